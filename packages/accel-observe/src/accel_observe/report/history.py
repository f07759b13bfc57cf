"""History of a run from its journal over all restarts, separated from the steps that restarts discarded."""

import bisect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.run_log import BEGUN, CONFIGURED, ENDED, JOURNAL, KIND, LOGGED, RESUMED, STEP, TIME, VALUES
from accel_observe.tracking.values import from_json
from accel_state.errors import ConfigError

READING, DESCRIBED = "reading", "described"
_ROUTINE = frozenset({BEGUN, CONFIGURED, LOGGED, READING, DESCRIBED})


@final
@dataclass(frozen=True, slots=True)
class Event:
    """An event: seconds since the run began, step, kind, and number of the process (life) that wrote it.

    An event without a step of its own has the step that was logged last before it.
    """

    seconds: float
    step: int | None
    kind: str
    text: str
    life: int
    facts: dict[str, Any]


@final
@dataclass(slots=True)
class History:
    """Contents of a run's journal.

    Attributes:
        curves: steps and values that count, in order, by name.
        lost: by name, for each process, the steps and values logged after the checkpoint from which the next process
            resumed.
        readings: the meter's readings that count, with ``life`` and ``seconds``.
        lives: seconds at which each process started or resumed the run.
        restarts: first step of each process but the first.
    """

    name: str
    began: float
    ended: float
    finished: bool
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    lost: dict[str, list[list[tuple[int, float]]]] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[list[dict[str, float]]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    lives: list[float] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    configuration: dict[str, Any] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last line."""
        return self.ended - self.began


def find_run(path: str | Path) -> Path:
    """Finds the journal of ``path``: the file itself, that of the folder, or that of the newest run below the folder.

    Raises:
        ConfigError: there is no journal.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place
    found = [one for depth in ("", "*/", "*/*/", "*/*/*/") for one in place.glob(f"{depth}{JOURNAL}")]
    if not found:
        raise ConfigError(
            f"there is no {JOURNAL} in {place} or up to three folders below; a run writes one once init_trackers was "
            "called and something logged"
        )
    return max(found, key=lambda one: (one.stat().st_mtime, one))


def read_history(journal: Path) -> History:
    """Reads a journal; skips lines that a crash truncated.

    Raises:
        ConfigError: the journal is empty.
    """
    lines = []
    for text in journal.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    if not lines:
        raise ConfigError(f"{journal} is empty")
    return history_of(lines, name=f"{journal.parent.parent.name} / {journal.parent.name}")


def history_of(lines: Iterable[dict[str, Any]], *, name: str = "run") -> History:
    """Builds the history from a journal's lines. A restart moves the values logged after its checkpoint to ``lost``."""
    lines = _without_repetitions(lines)
    began, ended = min(line[TIME] for line in lines), max(line[TIME] for line in lines)
    history = History(name, began, ended, finished=lines[-1][KIND] == ENDED)
    since = math.inf
    steps = sorted((line[TIME], line[STEP]) for line in lines if line[KIND] == LOGGED and line.get(STEP) is not None)
    for line in lines:
        kind, seconds = line[KIND], line[TIME] - began
        if kind in (BEGUN, RESUMED):
            history.lives.append(seconds)
        if kind == RESUMED:
            _take_back(history, line.get("marks", {}))
            since = line.get("since", line[TIME])
        elif kind == LOGGED and line.get(STEP) is not None and line[TIME] >= since:
            # Entries that were queued when the checkpoint was saved are older than ``since``: they are no step of this
            # process.
            history.restarts.append(line[STEP])
            since = math.inf
        _take_in(history, line)
        if kind not in _ROUTINE:
            history.events.append(_event(line, began, len(history.lives), steps))
    history.events.sort(key=lambda event: event.seconds)
    return history


def _event(line: dict[str, Any], began: float, life: int, steps: list[tuple[float, int]]) -> Event:
    """Builds the event of a line; ``steps``: time and number of each logged step."""
    kind = line[KIND]
    if kind == RESUMED:
        return Event(line[TIME] - began, None, kind, "a new process goes on from a checkpoint", life, {})
    facts = {key: value for key, value in line.items() if key not in (KIND, TIME, STEP)}
    text = str(facts.get("text") or _text_of(facts))
    before = bisect.bisect_right(steps, (line[TIME], math.inf))
    step = line.get(STEP, steps[before - 1][1] if before else None)
    return Event(line[TIME] - began, step, kind, text, life, facts)


def _text_of(facts: dict[str, Any]) -> str:
    """Formats facts for a reader: a path without its key, then the duration; others as key and value."""
    others = ", ".join(f"{key} {_short(value)}" for key, value in facts.items() if key not in ("path", "seconds"))
    path, seconds = str(facts.get("path", "")), facts.get("seconds")
    took = f"in {seconds:.2f} s" if isinstance(seconds, int | float) else ""
    return ", ".join(part for part in (f"{path} {took}".strip(), others) if part)


def _take_in(history: History, line: dict[str, Any]) -> None:
    """Adds the contents of a routine line: values, a reading, the configuration or a description."""
    if line[KIND] == LOGGED:
        _add_values(history, line)
    elif line[KIND] == READING:
        own = {"life": len(history.lives), "seconds": line[TIME] - history.began, "ranks": line.get("ranks", [])}
        reading = {**line[VALUES], **own}
        while history.readings and history.readings[-1]["step"] >= reading["step"]:  # their steps ascend
            history.readings.pop()
        history.readings.append(reading)
    elif line[KIND] == CONFIGURED:
        history.configuration = line[VALUES]
    elif line[KIND] == DESCRIBED:
        history.description = line[VALUES]


def _without_repetitions(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes duplicate lines. Entries that were queued when a checkpoint was saved may be logged again afterwards.

    Of duplicate values the last line counts: a restart discards values beyond its marks, and then logs them again.
    """
    once: dict[str, dict[str, Any]] = {}
    for line in lines:
        text = json.dumps(line, sort_keys=True)
        if line[KIND] == LOGGED:
            once.pop(text, None)
        once.setdefault(text, line)
    return list(once.values())


def _add_values(history: History, line: dict[str, Any]) -> None:
    for name, value in from_json(line[VALUES]).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            curve = history.curves.setdefault(name, [])
            step = line.get(STEP)
            curve.append((len(curve) if step is None else step, float(value)))


def _take_back(history: History, marks: dict[str, int]) -> None:
    for name, curve in history.curves.items():
        mark = marks.get(name, -1)
        gone = [point for point in curve if point[0] > mark]
        if gone:
            history.lost.setdefault(name, []).append(gone)
        history.curves[name] = [point for point in curve if point[0] <= mark]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
