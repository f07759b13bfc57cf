"""State of a loader as JSON values."""

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
class SavedLoader:
    """A position, with the facts for which it is valid.

    Attributes:
        cursor: the position.
        record: record of the source, see ``Source.record``.
        ended: whether the epoch is finished.
        private: state of this rank alone, or None.
    """

    cursor: Cursor
    record: Mapping[str, Json]
    ended: bool = False
    private: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values; the same on every rank except for the value of ``"private"``."""
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
    def read(cls, state: Mapping[str, Any]) -> "SavedLoader":
        """Parses a result of ``state_dict``; raises ``DataStateError`` for a missing, malformed or too new value."""
        version = state.get(VERSION_KEY)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise DataStateError(
                f"the loader's state has version {version!r}; this accel-data reads versions up to {STATE_VERSION}: "
                "resume with the version that wrote it, or a newer one"
            )
        cursor = Cursor.from_state(state)
        return cls(cursor, state.get(SOURCE_KEY) or {}, bool(state.get(ENDED_KEY)), state.get(PRIVATE_KEY))

    def moved(self, record: Mapping[str, Json], cursor: Cursor) -> "SavedLoader":
        """Returns this state with another record and position; at another position the epoch is not finished."""
        return replace(self, record=record, cursor=cursor, ended=self.ended and cursor == self.cursor)
