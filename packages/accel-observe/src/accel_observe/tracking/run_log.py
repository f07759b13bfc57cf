"""Run log: a table for spreadsheets and a journal for ``accel report``; needs only a folder."""

import csv
import io
import json
import os
import time as clock
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json, flatten

TABLE, JOURNAL = "metrics.csv", "run.jsonl"
STEP, OWN_ID = "step", "run_id"
OWN_STEP = "logged step"
"""Column of a logged value that is named ``step``, as the column of the steps is."""
KIND, TIME, VALUES = "kind", "time", "values"
_LONGEST_CELL = 2**31 - 1
_ENCODER = json.JSONEncoder(allow_nan=False)
BEGUN, RESUMED, LOGGED, CONFIGURED, ENDED = "begun", "resumed", "logged", "configured", "ended"


@final
class RunLogTracker(GeneralTracker):
    """Writes ``metrics.csv`` (a row for each step) and ``run.jsonl`` (all events and values, in order).

    Both are in ``<logging_dir>/<run_name>/<run_id>``. When a run resumes, its table is cut back to the checkpoint; the
    journal is append-only, and records where the run resumed.
    """

    name = "accel"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], run_id: str) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name / run_id
        self._since = clock.time()
        self._marks: Mapping[str, int] | None = None
        self._table: _Table | None = None
        self._journal: IO[str] | None = None

    @property
    def tracker(self) -> Path:
        """The run's folder."""
        return self.folder

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._table = _Table(self.folder / TABLE)
        if self._marks is not None:
            self._table.cut(self._marks)
        path = self.folder / JOURNAL
        _end_line(path)
        self._journal = path.open("a", encoding="utf-8")
        if self._marks is None:
            self.event(BEGUN)
        else:
            last = max(self._marks.values(), default=None)
            self.event(RESUMED, step=last, marks=dict(self._marks), since=self._since)
        self.flush()

    def resume(self, run: Continuation) -> None:
        self.folder = self.folder.parent / str(run.state[OWN_ID])
        self._marks = run.marks

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.event(CONFIGURED, values=values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        assert self._table is not None
        flat = dict(flatten(values))
        cells = {OWN_STEP if name == STEP else name: value for name, value in flat.items()}
        self._table.add(self._table.last + 1 if step is None else step, cells)
        self.event(LOGGED, step=step, time=kwargs.get(TIME), values=flat)

    def event(self, kind: str, step: int | None = None, time: float | None = None, **facts: Any) -> None:
        """Appends an event to the journal as one line of JSON."""
        assert self._journal is not None
        line: dict[str, Any] = {
            KIND: kind,
            TIME: clock.time() if time is None else time,
            **({} if step is None else {STEP: step}),
        }
        line.update(facts)
        try:
            text = _ENCODER.encode(line)
        except (TypeError, ValueError):
            text = _ENCODER.encode(as_json(line))
        self._journal.write(text + "\n")

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        self.event("table", step=step, name=table_name, columns=kwargs.get("columns"), data=kwargs.get("data"))

    def flush(self) -> None:
        assert self._table is not None
        assert self._journal is not None
        self._table.flush()
        self._journal.flush()

    def finish(self) -> None:
        self.event(ENDED)
        self.flush()
        assert self._table is not None
        assert self._journal is not None
        self._table.close()
        self._journal.close()


@final
class _Table:
    """CSV file with a row for each step; values of one step share a row, and new names become new columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = [STEP]
        self._row: dict[str, Any] = {}
        self._row_at = 0
        self.last = -1
        if path.exists():
            self._continue()
        else:
            path.write_text(_line(self._columns), encoding="utf-8")
        self._file = self._at_end()

    def _at_end(self) -> IO[str]:
        file = self._path.open("r+", encoding="utf-8", newline="")
        file.seek(0, io.SEEK_END)
        return file

    def _continue(self) -> None:
        rows = list(self.rows())
        self._rewrite(rows, [STEP, *dict.fromkeys(name for row in rows for name in row if name != STEP)])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the file as text; a last line that a crash truncated is left out."""
        with self._path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        limit = csv.field_size_limit(_LONGEST_CELL)  # that of the process
        try:
            rows = list(csv.DictReader(io.StringIO(whole, newline="")))
        finally:
            csv.field_size_limit(limit)
        for row in rows:
            if (row.get(STEP) or "").lstrip("-").isdigit():
                yield {name: value for name, value in row.items() if value not in (None, "") and name is not None}

    def _rewrite(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        """Replaces the file atomically; if that fails, the table is as before and can be tried again."""
        draft = self._path.with_suffix(".csv.draft")
        last: dict[str, Any] = {}
        with draft.open("w", encoding="utf-8", newline="") as file:
            file.write(_line(columns))
            last_at = file.tell()
            for row in rows:
                last, last_at = row, file.tell()
                file.write(_line([row.get(name, "") for name in columns]))
        os.replace(draft, self._path)
        self._columns, self._row, self._row_at = columns, last, last_at
        self.last = max((int(row[STEP]) for row in rows), default=-1)

    def cut(self, marks: Mapping[str, int]) -> None:
        """Removes every value later than its name's mark, and values of names without a mark."""
        self._file.close()
        kept = []
        for row in self.rows():
            step = int(row[STEP])
            left = {name: value for name, value in row.items() if step <= marks.get(name, -1)}
            if left:
                kept.append({STEP: row[STEP], **left})
        self._rewrite(kept, self._columns)
        self._file = self._at_end()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._file.flush()
            self._rewrite(list(self.rows()), [*self._columns, *new])
            self._file.close()
            self._file = self._at_end()
        if self._row and int(self._row[STEP]) == step:
            self._file.seek(self._row_at)
            self._file.truncate()
            self._row = {**self._row, **values}
        else:
            self._row_at = self._file.tell()
            self._row = {STEP: step, **values}
        self._file.write(_line([self._row.get(name, "") for name in self._columns]))
        self.last = max(self.last, step)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(values: list[Any]) -> str:
    if all(isinstance(value, int | float) or value == "" for value in values):
        return ",".join(map(str, values)) + "\n"
    text = io.StringIO()
    csv.writer(text).writerow(values)  # with another end of its lines, it would not quote a carriage return
    return text.getvalue().removesuffix("\r\n") + "\n"


def _end_line(path: Path) -> None:
    """Terminates a last line that a crash truncated, so that the next line starts on its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
