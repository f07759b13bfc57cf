"""Tracer: runs one step of a model on fake tensors and records its marks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from accel_planner import private
from accel_planner.errors import PlanError
from accel_planner.profile.memory_tracker import StorageWatch
from accel_planner.profile.profile import Mark, MarkKind, Timeline

Step = Callable[[], torch.Tensor]


def trace(
    model: nn.Module,
    step: Step,
    *,
    units: Mapping[int, nn.Module],
    unit_of: Mapping[int, int],
    known: Iterable[torch.Tensor],
    fake: AbstractContextManager[Any],
) -> Timeline:
    """Traces one forward and backward into a timeline.

    Args:
        model: a model with fake parameters; the tracer adds hooks to it.
        step: computes the loss.
        units: the modules to mark, by index.
        unit_of: index of the unit of each parameter, by the parameter's id.
        known: tensors that are not activations: parameters, buffers, the batch.
        fake: the mode in which fake tensors are made.

    Raises:
        PlanError: the backward needs values.
    """
    parameters = list(model.parameters())
    with fake, StorageWatch(known, count_flops=True) as watch:
        hooks = [hook for index, module in units.items() for hook in _mark(module, index, watch)]
        try:
            loss = step()
            _backward(loss, model)
        finally:
            for hook in hooks:
                hook.remove()
        watch.note(("end", 0))
        gradients = {
            watch.key_of(parameter.grad): unit_of[id(parameter)]
            for parameter in parameters
            if parameter.grad is not None
        }
        events = list(watch.events)
        for parameter in parameters:
            parameter.grad = None
    return Timeline(_marks(events, gradients), watch.flops)


def _backward(loss: torch.Tensor, model: nn.Module) -> None:
    try:
        loss.backward()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise PlanError(
            f"the backward of {type(model).__name__} cannot be run on tensors without values ({type(error).__name__}: "
            f"{text}); name a strategy, or give the planner a model whose backward reads no values"
        ) from error


def _marks(events: Iterable[tuple[Any, int]], gradients: Mapping[int, int]) -> tuple[Mark, ...]:
    """Reduces the allocations and releases between two marks to their peak and last level."""
    marks: list[Mark] = []
    level = highest = flops = 0
    for what, size in events:
        if isinstance(what, tuple):
            kind, unit = what
            flops = size
            marks.append(Mark(cast(MarkKind, kind), unit, highest, level, flops=flops))
            highest = level
        elif what in gradients:
            if size > 0:
                marks.append(Mark("gradient", gradients[what], highest, level, size, flops))
                highest = level
        else:
            level += size
            highest = max(highest, level)
    return tuple(marks)


def _mark(module: nn.Module, index: int, watch: StorageWatch) -> list[Any]:
    """Adds hooks that mark when forward and backward enter and leave a module, where FSDP has its hooks."""

    def entered(_: nn.Module, args: Any, kwargs: Any) -> Any:
        watch.note(("enter", index))
        return _through((args, kwargs), lambda: watch.note(("leave", index)))

    def exited(_: nn.Module, args: Any, output: Any) -> None:
        watch.note(("exit", index))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: watch.note(("reenter", index)))

    return [
        module.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
        module.register_forward_hook(exited),
    ]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private.leaves(tree) if isinstance(leaf, torch.Tensor)]


def _through(tree: Any, left: Callable[[], None]) -> Any:
    """Returns the same arguments; ``left`` is called when the backward has passed those that require gradients."""
    leaves, spec = private.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not places or not torch.is_grad_enabled():
        return tree
    passed = _Leave.apply(left, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return private.unflatten(leaves, spec)


class _Leave(torch.autograd.Function):
    """Identity function whose backward calls a function when the gradients of its arguments are known."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.left = left
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.left()
        return None, *gradients
