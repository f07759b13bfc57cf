"""Forwards of sharded units, recorded as operations of all ranks, so that ranks that take different ones fail."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, final

import torch
from torch import nn

from accel_state.watchdog.decorator import active
from accel_state.watchdog.operation_record import Record

_FORWARD = "forward"
_Method = TypeVar("_Method", bound=Callable[..., None])


def _untraced(method: _Method) -> _Method:
    """Keeps a compiled unit from tracing the method; torch's public way would import the compiler here."""
    return cast(_Method, cast(Any, torch)._disable_dynamo(method))


def watch_units(
    model: nn.Module, kind: str, units: Mapping[str, tuple[nn.Module, nn.Module]], group: Any, *, replicas: int
) -> None:
    """Records each unit's gathering in the hang doctor's record, and the end of the model's forward.

    Units are gathered by all ranks together. If ranks called different ones (skipped layers, experts), a gathering
    would hang, or fill a unit with the weights of another. Ranks of one machine are compared before each gathering,
    those of several machines at the end of each forward, as far as all of them gather together. Nothing is recorded
    where no doctor watches ``group``. Collective.

    Args:
        model: what is called.
        kind: the class of the user's model.
        units: by name, the module before whose hooks a unit is gathered, and the one after whose hooks it is whole.
        replicas: in how many groups of ranks, each of which gathers by itself, the model is sharded.
    """
    doctor = active()
    if doctor is None or not doctor.concerns(group):
        return
    for name, (gathering, whole) in units.items():
        unit = _Recorded(f"{kind}.{name}" if name else kind)
        gathering.register_forward_pre_hook(unit.enter, prepend=True)
        whole.register_forward_pre_hook(unit.leave)
    if replicas == 1:
        doctor.compare_machines()
    end = _Recorded(f"end of {kind}")
    model.register_forward_hook(end.pass_by)


@final
class _Recorded:
    """One operation, entered again and again."""

    __slots__ = ("_entered", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._entered: Record | None = None

    @_untraced
    def enter(self, *_: Any) -> None:
        """The unit is about to be gathered.

        Raises:
            CollectiveMismatchError: another rank of this machine gathers another one, or does something else.
        """
        self.leave()  # of a forward that failed
        doctor = active()
        if doctor is not None and threading.current_thread() is threading.main_thread():
            doctor.enter(_FORWARD, self._what, shared=True)
            self._entered = doctor.record

    @_untraced
    def leave(self, *_: Any) -> None:
        """The unit is whole."""
        record, self._entered = self._entered, None
        if record is not None and record.inside:
            record.leave()

    @_untraced
    def pass_by(self, *_: Any) -> None:
        """The operation takes no time; ranks of several machines are compared after it."""
        self.enter()
        self.leave()
        doctor = active()
        if doctor is not None and threading.current_thread() is threading.main_thread():
            doctor.compare()
