"""Spool and note of one tracker: files for its undelivered values and for the identity of its run."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from accel_observe.tracking.values import as_json, from_json, plain


class SpooledCall(NamedTuple):
    """One call of a tracker's method: values, step and further arguments."""

    method: str
    values: Any
    step: int | None
    kwargs: dict[str, Any]

    def to_json(self) -> list[Any] | None:
        """Returns the call as JSON; None if JSON cannot represent it (images)."""
        if self.method == "log_images":
            return None
        return [self.method, as_json(plain(self.values)), self.step, as_json(self.kwargs)]

    @classmethod
    def from_json(cls, value: list[Any]) -> "SpooledCall":
        """Inverse of ``to_json``."""
        method, values, *rest = value
        return cls(method, from_json(values) if method == "log" else values, *rest)


@final
class Spool:
    """Appends entries to a file and reads them back; a line that a crash truncated is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entries: Iterable[SpooledCall]) -> int:
        """Appends the entries; returns the number of entries written (images cannot be).

        Raises:
            OSError: the file cannot be written.
        """
        lines = [json.dumps(line) for entry in entries if (line := entry.to_json()) is not None]
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        return len(lines)

    def take(self) -> list[SpooledCall]:
        """Returns all entries and deletes the file."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(SpooledCall.from_json(json.loads(line)))
            except (ValueError, TypeError):
                continue
        self.path.unlink()
        return entries


@final
class Note:
    """File with a tracker's ``state_dict``, so that it survives a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, state: dict[str, Any]) -> None:
        """Replaces the noted state atomically.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(as_json(state)), encoding="utf-8")
        os.replace(draft, self.path)

    def read(self) -> dict[str, Any] | None:
        """Returns the noted state; None if there is none.

        Raises:
            OSError: the file cannot be read.
        """
        if not self.path.exists():
            return None
        return cast(dict[str, Any], json.loads(self.path.read_text(encoding="utf-8")))
