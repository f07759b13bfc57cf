"""Interface of the run that a meter observes: the attributes of an Accelerator that it reads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from accel_backends import Backend
    from accel_state.session import Session


class ObservedRun(Protocol):
    """The attributes of an Accelerator that a meter reads."""

    session: "Session"
    backend: "Backend"
    _models: "list[nn.Module]"
    _progress_of_run: Any
    _told_stragglers: set[tuple[int, str]]

    @property
    def _optimizers(self) -> Sequence[Any]:
        """The prepared optimizers."""

    @property
    def device(self) -> Any:
        """The device of the step."""

    def log_event(self, kind: str, **facts: Any) -> None:
        """Writes an event into the run log."""
