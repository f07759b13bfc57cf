"""Watchdog records of the forwards of sharded units, so that ranks that compute different units raise errors."""

import threading
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from accel_state.private import untraced
from accel_state.watchdog.decorator import active
from accel_state.watchdog.operation_record import Record

_FORWARD = "forward"


def watch_units(
    model: nn.Module, kind: str, units: Mapping[str, tuple[nn.Module, nn.Module]], group: Any, *, replicas: int
) -> None:
    """Records the all-gathers of units in forward, and the end of the model's forward, with the watchdog.

    All ranks all-gather a unit together. If ranks call different units (skipped layers, experts), an all-gather hangs,
    or fills a unit with another unit's weights. Ranks of one node are compared before each all-gather, ranks of several
    nodes at the end of each forward, provided that all ranks gather together. Replicas are compared where gradients are
    enabled only, because they may evaluate different numbers of batches. Nothing is recorded if no watchdog observes
    ``group``.

    Collective: every rank of the group must call this.

    Args:
        model: the module that is called.
        kind: class name of the user's model.
        units: by name, the module whose pre-hooks all-gather a unit, and the module before whose forward it is full.
        replicas: number of groups of ranks that shard the model, each of which gathers by itself.
    """
    watchdog = active()
    if watchdog is None or not watchdog.concerns(group):
        return
    for name, (gathering, module) in units.items():
        unit = _Recorded(f"{kind}.{name}" if name else kind, replicas)
        gathering.register_forward_pre_hook(unit.enter, prepend=True)
        module.register_forward_pre_hook(unit.leave)
    if replicas == 1:
        watchdog.compare_machines()
    end = _Recorded(f"end of {kind}", replicas)
    model.register_forward_hook(end.pass_by)


@final
class _Recorded:
    """One recorded operation, entered in each forward."""

    __slots__ = ("_entered", "_replicas", "_what")

    def __init__(self, what: str, replicas: int) -> None:
        self._what, self._replicas = what, replicas
        self._entered: Record | None = None

    @untraced
    def enter(self, *_: Any) -> None:
        """Records that the unit is about to be all-gathered.

        Raises:
            CollectiveMismatchError: another rank of this node gathers another unit, or runs another operation.
        """
        self.leave()  # left over from a forward that failed
        watchdog = active()
        if watchdog is not None and threading.current_thread() is threading.main_thread():
            watchdog.enter(_FORWARD, self._what, shared=self._replicas == 1 or torch.is_grad_enabled())
            self._entered = watchdog.record

    @untraced
    def leave(self, *_: Any) -> None:
        """Records that the unit is gathered."""
        record, self._entered = self._entered, None
        if record is not None and record.inside:
            record.leave()

    @untraced
    def pass_by(self, *_: Any) -> None:
        """Records an operation without duration, and then compares the ranks of several nodes."""
        self.enter()
        self.leave()
        watchdog = active()
        if watchdog is not None and threading.current_thread() is threading.main_thread():
            watchdog.compare()
