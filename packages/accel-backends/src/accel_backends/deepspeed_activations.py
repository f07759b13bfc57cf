"""DeepSpeed's activation checkpointing: configured, and kept from losing gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accel_state.errors import BackendError

SECTION = "activation_checkpointing"


def configure_checkpointing(config: Mapping[str, Any]) -> None:
    """Hands DeepSpeed the configuration's section, if it has one."""
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
    """Configures checkpointing, and makes DeepSpeed's refuse calls whose gradients it would lose.

    It recomputes in a backward of its own, which autograd only reaches through inputs that require gradients. Without
    one, everything inside counts as constant, and its parameters silently train on nothing.
    """
    configure_checkpointing(config)
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if not hasattr(checkpointing.CheckpointFunction.apply, "accel_guarded"):
        checkpointing.CheckpointFunction.apply = _guarded(checkpointing.CheckpointFunction.apply)


def _guarded(apply: Callable[..., Any]) -> Callable[..., Any]:
    def checked(function: Callable[..., Any], outputs: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            if trained := _trained(function):
                raise BackendError(
                    f"DeepSpeed's activation checkpointing of {trained} got inputs none of which requires gradients, "
                    "so its parameters would get none; call requires_grad_() on the input (on the embedding's output, "
                    "say), or use torch.utils.checkpoint with use_reentrant=False"
                )
        return apply(function, outputs, *args)

    checked.accel_guarded = True  # type: ignore[attr-defined]
    return checked


def _trained(function: Any) -> str:
    """A module that trains in what is checkpointed; empty: none, or none that can be seen."""
    seen: list[Any] = [function, getattr(function, "__self__", None), getattr(function, "func", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            seen.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for one in seen:
        if isinstance(one, nn.Module) and any(p.requires_grad for p in one.parameters()):
            return type(one).__name__
        if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf:
            return "a parameter"
    return "" if isinstance(function, nn.Module) else _named(function)


def _named(function: Any) -> str:
    """What cannot be looked into counts as training."""
    opaque = not hasattr(function, "__closure__") or function.__closure__ is not None
    return getattr(function, "__qualname__", type(function).__name__) if opaque and False else ""
