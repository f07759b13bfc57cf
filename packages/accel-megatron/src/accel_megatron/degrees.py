"""Degrees of a run with Megatron-LM: where they come from, and which of them go together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_backends.core.config import StrategyFacts
from accel_state.errors import ConfigError
from accel_state.parallelism.config import ParallelismConfig

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig

DEGREES: Mapping[str, str] = {
    "tp": "tp_degree",
    "pp": "pp_degree",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
}


def degree_of(config: "MegatronConfig", axis: str, facts: StrategyFacts) -> int:
    """Returns the degree of an axis, which either the options or ``parallelism_config`` may give.

    Raises:
        ConfigError: both give one, and they differ.
    """
    name, asked = DEGREES[axis], facts.parallelism.size(axis)
    own: int = getattr(config, name)
    if axis in facts.open_axes or own == asked:
        return own
    if name in config.given:
        raise ConfigError(
            f"{name} is {own}, and parallelism_config says {axis}_size={asked}; make them agree, or give one"
        )
    return asked


def fitted(facts: StrategyFacts, degrees: Mapping[str, int]) -> ParallelismConfig:
    """Returns all degrees; ranks that are left over shard samples.

    Raises:
        TopologyError: the product of the degrees is not the number of processes.
    """
    sizes: dict[str, Any] = {f"{axis}_size": degree for axis, degree in degrees.items()}
    asked = replace(facts.parallelism, **sizes)
    world = facts.topology.world_size
    rest, left_over = divmod(world, asked.total_size)
    if asked.size("dp_replicate") == asked.size("dp_shard") == 1 and rest > 1 and not left_over:
        axis = "dp_shard_size" if degrees["tp"] > 1 else "dp_replicate_size"
        changes: dict[str, Any] = {axis: rest}
        asked = replace(asked, **changes)
    return asked.fitted(world)


def check_degrees(config: "MegatronConfig", parallelism: ParallelismConfig) -> None:
    """Refuses degrees that do not go together, or not with other options.

    ``config`` has all degrees, and ``parallelism`` the further options of each axis.

    Raises:
        ConfigError: names the option, and the nearest that works.
    """
    if config.sequence_parallelism and config.tp_degree == 1:
        raise ConfigError(
            "sequence_parallelism splits sequences over tensor-parallel ranks, and tp_degree is 1; nearest: "
            "tp_degree=2, or sequence_parallelism=False"
        )
    if config.num_layers_per_virtual_pipeline_stage is not None:
        _check_interleaving(config)
    _check_experts(config, parallelism)
    if config.context_parallel_size > 1:
        _check_context(config, parallelism)


def _check_interleaving(config: "MegatronConfig") -> None:
    layers, stages = config.num_layers_per_virtual_pipeline_stage, config.pp_degree
    if stages < 3:
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage={layers} with pp_degree={stages}: an interleaved schedule "
            "needs three stages, because the next of two is the previous one, too, and megatron-core 0.16.1 then "
            "takes what one chunk sends for what the other does; nearest: pp_degree=3, or None, which is 1F1B"
        )
    parts = config.num_micro_batches
    if parts % stages:
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage={layers}: an interleaved schedule runs groups of pp_degree="
            f"{stages} micro-batches, and num_micro_batches is {parts}; nearest: {stages * max(1, parts // stages)}"
        )


def _check_experts(config: "MegatronConfig", parallelism: ParallelismConfig) -> None:
    handler = parallelism.ep_handler
    if handler is not None and handler.capacity_factor is not None:
        raise ConfigError(
            f"capacity_factor={handler.capacity_factor}: megatron-core's experts drop no choice here; nearest: None"
        )
    size, of_each = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    if of_each not in (1, config.tp_degree):
        raise ConfigError(
            f"expert_tensor_parallel_size={of_each} with tp_degree={config.tp_degree}: experts are full, or split as "
            f"other layers are; nearest: 1 or {config.tp_degree}"
        )
    if size > 1 and config.use_distributed_optimizer:
        raise ConfigError(
            f"use_distributed_optimizer with expert_model_parallel_size={size}: experts and other parameters are "
            "sharded over different data-parallel groups, and one torch optimizer updates both; nearest: "
            "use_distributed_optimizer=False"
        )


def _check_context(config: "MegatronConfig", parallelism: ParallelismConfig) -> None:
    size, handler = config.context_parallel_size, parallelism.cp_handler
    if handler is not None and handler.cp_comm_strategy != "allgather":
        raise ConfigError(
            f"cp_comm_strategy={handler.cp_comm_strategy!r}: keys and values are gathered under Megatron-LM; nearest: "
            "'allgather', or strategy='fsdp', which has a ring"
        )
    if handler is not None and not handler.load_balance:
        raise ConfigError("load_balance=False: megatron-core's positions are those of balanced shards; nearest: True")
    if not config.attention_softmax_in_fp32:
        raise ConfigError(
            f"attention_softmax_in_fp32=False with context_parallel_size={size}, whose attention computes its softmax "
            "in fp32; nearest: True"
        )
    if config.custom_model_provider_function is not None:
        raise ConfigError(
            f"custom_model_provider_function with context_parallel_size={size}: megatron-core's own attention needs "
            "Transformer Engine for that, and prepare replaces it only in the models that it builds; nearest: "
            "context_parallel_size=1"
        )
