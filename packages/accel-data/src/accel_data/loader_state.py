"""The state of a loader as JSON values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from accel_data.order.cursor import Cursor
from accel_data.source import Json
from accel_state.errors import DataStateError

STATE_VERSION = 1
VERSION_KEY = "version"
SOURCE_KEY = "source"
PRIVATE_KEY = "private"
ENDED_KEY = "ended"


@final
@dataclass(frozen=True, slots=True)
class LoaderState:
    """A position, and what it is only valid with.

    Attributes:
        cursor: the position.
        record: of the source, see ``Source.record``.
        ended: nothing of the epoch is left.
        private: what belongs to this rank alone, or None.
    """

    cursor: Cursor
    record: Mapping[str, Json]
    ended: bool = False
    private: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """JSON values; the same on every rank but for the part under ``"private"``."""
        state: dict[str, Any] = {
            VERSION_KEY: STATE_VERSION,
            **self.cursor.state_dict(),
            SOURCE_KEY: dict(self.record),
        }
        if self.ended:
            state[ENDED_KEY] = True
        if self.private is not None:
            state[PRIVATE_KEY] = dict(self.private)
        return state

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "LoaderState":
        """Reads what ``state_dict`` wrote; raises ``DataStateError`` naming what is missing, malformed or too new."""
        version = state.get(VERSION_KEY)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise DataStateError(
                f"the loader's state has version {version!r}; this accel-data reads versions up to {STATE_VERSION}: "
                "resume with the version that wrote it, or a newer one"
            )
        cursor = Cursor.from_state(state)
        return cls(cursor, state.get(SOURCE_KEY) or {}, bool(state.get(ENDED_KEY)), state.get(PRIVATE_KEY))

    def moved(self, record: Mapping[str, Json], cursor: Cursor) -> "LoaderState":
        """This state with another record and position; at another position nothing has ended."""
        return replace(self, record=record, cursor=cursor, ended=self.ended and cursor == self.cursor)
