"""Kinds of objects that ``prepare`` accepts, and checks that they belong together."""

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel.optimizer import PreparedOptimizer
from accel.scheduler import PreparedScheduler
from accel_state.errors import PrepareError

Kind = Literal["model", "optimizer", "scheduler", "loader", "prepared", "other"]


@singledispatch
def kind_of(item: object) -> Kind:
    """Kind of ``item`` for ``prepare``; objects of other types are returned unchanged.

    ``kind_of.register`` adds a type of another library.
    """
    steps = all(callable(getattr(item, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return "scheduler" if steps and hasattr(item, "optimizer") else "other"


@kind_of.register
def _(item: nn.Module) -> Kind:
    return "model"


@kind_of.register
def _(item: Optimizer) -> Kind:
    return "optimizer"


@kind_of.register
def _(item: LRScheduler) -> Kind:
    return "scheduler"


@kind_of.register(DataLoader)
def _(item: object) -> Kind:
    return "loader"


@kind_of.register
def _(item: PreparedOptimizer) -> Kind:
    return "prepared"


@kind_of.register
def _(item: PreparedScheduler) -> Kind:
    return "prepared"


def check_driven(schedulers: Iterable[Any], optimizers: Sequence[Optimizer]) -> None:
    """Verifies that schedulers drive optimizers that are prepared, or are about to be.

    Raises:
        PrepareError: a scheduler drives another optimizer, whose learning rates it would change without effect.
    """
    for scheduler in schedulers:
        driven = getattr(scheduler, "optimizer", None)
        if not isinstance(driven, Optimizer) or not optimizers:
            continue
        if not any(driven is one or driven.param_groups is one.param_groups for one in optimizers):
            kinds = ", ".join(type(getattr(one, "optimizer", one)).__name__ for one in optimizers)
            raise PrepareError(
                f"{type(scheduler).__name__} drives a {type(driven).__name__} that is not prepared ({kinds} is); "
                "build it on the optimizer that prepare is given"
            )


def batch_sizes(items: Sequence[Any], kinds: Sequence[str], share: float) -> tuple[int, ...]:
    """Micro-batch sizes of the loaders among ``items`` that have one, if a process gets ``share`` of their batches."""
    given = [getattr(item, "batch_size", None) for item, kind in zip(items, kinds, strict=True) if kind == "loader"]
    return tuple(max(1, int(size * share)) for size in given if isinstance(size, int))
