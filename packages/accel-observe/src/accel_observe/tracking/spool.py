"""Files beside a run's log for one tracker: values that it could not take, and the identity of its run."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from accel_observe.tracking.values import as_json, plain


class SpooledCall(NamedTuple):
    """One call to be made on a tracker: its method, what is logged, the step and further arguments."""

    method: str
    values: Any
    step: int | None
    kwargs: dict[str, Any]

    def to_json(self) -> list[Any] | None:
        """As JSON; None for what JSON cannot hold (images)."""
        if self.method == "log_images":
            return None
        return [self.method, as_json(plain(self.values)), self.step, as_json(self.kwargs)]

    @classmethod
    def from_json(cls, value: list[Any]) -> "SpooledCall":
        """The entry that ``to_json`` gave."""
        return cls(*value)


@final
class Spool:
    """Appends entries to a file, and gives them back; a line that was cut off by a crash is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entries: Iterable[SpooledCall]) -> int:
        """Writes the entries; returns how many could be written (images cannot).

        Raises:
            OSError: the disk refuses.
        """
        lines = [json.dumps(line) for entry in entries if (line := entry.to_json()) is not None]
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        return len(lines)

    def take(self) -> list[SpooledCall]:
        """All entries; the file is gone then."""
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
    """A file with a tracker's own words for the run, so that a process that is killed leaves them behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, state: dict[str, Any]) -> None:
        """Puts ``state`` in the place of what was noted, whole.

        Raises:
            OSError: the disk refuses.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(as_json(state)), encoding="utf-8")
        os.replace(draft, self.path)

    def read(self) -> dict[str, Any] | None:
        """What was noted; None where nothing was.

        Raises:
            OSError: the disk refuses.
        """
        if not self.path.exists():
            return None
        return cast(dict[str, Any], json.loads(self.path.read_text(encoding="utf-8")))
