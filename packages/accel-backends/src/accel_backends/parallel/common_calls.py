"""Calls of a model that ranks of its axes make together, which have to be of one kind on all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_state.private import untraced
from accel_state.watchdog.decorator import active, explain

if TYPE_CHECKING:
    from accel_backends.core.run import Run

_DATA_AXES = ("dp_replicate", "dp_shard")
_LABELS = ("labels", "shift_labels")


@final
class CommonCalls:
    """Compares the kinds of calls by the records of the watchdog, without communication.

    Ranks that differ in ``dp_replicate`` or ``dp_shard`` alone may evaluate different numbers of batches, and are not
    compared. Nothing is compared if no watchdog observes the run's group.

    Args:
        run: the run, whose degrees say which ranks compute together.
        model: class name of the user's model.
        needed: ranks, in the run, that this one waits for within a call, and whose errors it learns from nobody else.
    """

    def __init__(self, run: "Run", model: str, *, needed: Sequence[int] = ()) -> None:
        degrees, rank = run.parallelism, run.session.rank
        own = degrees.coordinates(rank)
        self.ranks = tuple(
            other
            for other in range(degrees.total_size)
            if all(degrees.coordinates(other)[axis] == own[axis] for axis in _DATA_AXES)
        )
        self._group, self._model, self._needed = run.session.group, model, tuple(needed)
        self._labels = degrees.size("cp") * degrees.size("sp") > 1

    def kind(self, given: Mapping[str, Any], *, trains: bool | None = None) -> str:
        """Words for a call with the arguments ``given``: gradients, and labels where ranks sum their number.

        ``trains``: whether a call with gradients trains, for models to which that makes a difference.
        """
        mode = "with gradients" if torch.is_grad_enabled() else "under torch.no_grad()"
        if trains is not None and torch.is_grad_enabled():
            mode += " in training mode" if trains else " in evaluation mode"
        labels = ""
        if self._labels and not (trains and torch.is_grad_enabled()):
            labels = f" {'with' if any(given.get(name) is not None for name in _LABELS) else 'without'} labels"
        return f"{self._model} is called {mode}{labels}"

    @contextmanager
    def call(self, given: Mapping[str, Any], *, trains: bool) -> Iterator[None]:
        """Context of one call of this rank.

        Raises:
            CollectiveMismatchError: other ranks make another kind of call; raised before any communication.
            CollectiveError: the same, on ranks that began before; or a needed rank failed.
        """
        watchdog = active()
        if watchdog is None or not watchdog.concerns(self._group):
            yield
            return
        watchdog.begin_call(self.ranks, self.kind(given, trains=trains), self._needed)
        try:
            yield
        except Exception as error:
            explain(error)
            raise
        finally:
            watchdog.record.calls.end()

    def attach(self, model: nn.Module) -> None:
        """Compares each call of a model, before its other hooks; of one rank, does nothing."""
        if len(self.ranks) > 1:
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)

    @untraced
    def _begin(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        watchdog = active()
        if watchdog is not None and watchdog.concerns(self._group):
            watchdog.begin_call(self.ranks, self.kind(kwargs), self._needed)
