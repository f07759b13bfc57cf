"""Configuration of DeepSpeed's activation checkpointing, and refusal of calls whose gradients it would lose."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accel_state.errors import BackendError

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


def guard_checkpointing(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Configures activation checkpointing, and makes DeepSpeed's function refuse calls whose gradients it would lose.

    DeepSpeed recomputes activations in a custom autograd function, whose backward runs only if an input requires
    gradients. Otherwise everything inside is constant for autograd, and its parameters silently get no gradients.
    """
    configure_checkpointing(config)
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if not hasattr(checkpointing.CheckpointFunction.apply, "accel_guarded"):
        checkpointing.CheckpointFunction.apply = _guarded(checkpointing.CheckpointFunction.apply)


def _guarded(apply: Callable[..., Any]) -> Callable[..., Any]:
    def checked(function: Callable[..., Any], outputs: Any, *args: Any) -> Any:
        cut = torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        trained = trained_in(function) if cut else ""
        if trained:
            raise BackendError(
                f"DeepSpeed's activation checkpointing of {trained} got inputs none of which requires gradients, so "
                "its parameters would get none; call requires_grad_() on the input (on the embedding's output, say), "
                "or use torch.utils.checkpoint with use_reentrant=False"
            )
        return apply(function, outputs, *args)

    checked.accel_guarded = True  # type: ignore[attr-defined]
    return checked


def trained_in(function: Any) -> str:
    """Returns the class name of a trainable module that a checkpointed function refers to; empty if none is found."""
    seen: list[Any] = [function, getattr(function, "__self__", None), getattr(function, "func", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            seen.append(cell.cell_contents)
        except ValueError:  # the closure variable has no value yet
            continue
    for one in seen:
        modules = one if isinstance(one, list | tuple) else [one]
        for module in modules:
            if isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters()):
                return type(module).__name__
    return ""
