"""Configuration of DeepSpeed's activation checkpointing."""

from collections.abc import Mapping
from typing import Any

SECTION = "activation_checkpointing"


def configure_checkpointing(config: Mapping[str, Any]) -> None:
    """Configures DeepSpeed's activation checkpointing from the configuration's section, if there is one."""
    section = config.get(SECTION)
    if not section:
        return
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.configure(
        None,
        partition_activations=bool(section.get("partition_activations", False)),
        contiguous_checkpointing=bool(section.get("contiguous_memory_optimization", False)),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=bool(section.get("cpu_checkpointing", False)),
        synchronize=bool(section.get("synchronize_checkpoint_boundary", False)),
        profile=bool(section.get("profile", False)),
    )
