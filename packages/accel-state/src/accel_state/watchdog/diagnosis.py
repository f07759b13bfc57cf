"""Diagnosis of a hang from the known states of all ranks; pure functions, which read no process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from accel_state.watchdog.operation_record import RecordedOperation, RecordSnapshot

Life = Literal["alive", "stopped", "silent", "dead", "left"]

STALLED = 3.0
"""Seconds inside one operation, without using the CPU, after which a rank counts as waiting."""
PATIENCE = 5.0
"""Seconds for which a rank must be stopped, or all ranks must be waiting, before the diagnosis is final."""
REMARKABLE = 8.0
"""Seconds of waiting for a live rank outside the operation, after which a warning (and nothing more) is reported."""


@final
@dataclass(frozen=True, slots=True)
class RankState:
    """Known state of one rank: whether its process lives, for how many seconds that has been so, and its last record.

    ``reason`` is why the process ended, or why a live rank cannot continue. ``idle`` is the time in seconds without a
    change of operation and without CPU use; ``waiting`` is the same if the rank is inside an operation, or the time for
    which it has waited for a collective on its device, otherwise 0.
    """

    rank: int
    life: Life
    lasting: float
    snapshot: RecordSnapshot | None
    waiting: float = 0.0
    reason: str = ""
    idle: float = 0.0

    @property
    def current(self) -> RecordedOperation | None:
        return None if self.snapshot is None else self.snapshot.current

    @property
    def last(self) -> RecordedOperation | None:
        return None if self.snapshot is None else self.snapshot.last

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or has been stopped or silent for so long that nobody waits for it."""
        return self.life in ("dead", "left") or (self.life in ("stopped", "silent") and self.lasting >= PATIENCE)


@final
@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Progress of a rank relative to a rank that waits for it before a collective.

    Attributes:
        passed: the rank does not reach the collective: it has ended, is stopped or silent, or is inside a later
            collective.
        ahead: the rank has begun a counted operation, like backward, that the waiting rank has not begun.
        idle: seconds without a change of operation and without CPU use.
    """

    text: str
    passed: bool
    ahead: bool
    idle: float


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Culprits, a report for the user, and whether the hang is final (it cannot resolve by itself)."""

    culprits: tuple[int, ...]
    text: str
    final: bool


def diagnose(states: Sequence[RankState], *, lost: bool = False) -> Diagnosis | None:
    """Returns the cause of a hang; None if no rank is waiting, or not long enough for a report.

    ``lost``: a collective failed because a connection broke, so that no rank needs to be waiting.
    """
    waiting = [state for state in states if state.life == "alive" and state.waiting >= STALLED]
    if not waiting and not lost:
        return None
    gone = [state for state in states if state.is_gone]
    if lost or min(state.waiting for state in waiting) >= PATIENCE:
        gone += [state for state in states if state.life == "alive" and state.reason and state.current is None]
    # Ranks that failed only because another rank had failed are no culprits.
    gone = [state for state in gone if not state.reason.startswith("CollectiveError")] or gone
    parted = _parted_shared(states)
    if parted and any(state.reason.startswith("CollectiveMismatchError") for state in gone):
        return _told(states, parted, final=True)
    if gone:
        return _told(states, gone, final=True)
    parted = _parted(states)
    if parted and all(state.current is not None for state in states):
        if lost or all(state.waiting >= PATIENCE for state in states):
            return _told(states, parted, final=True)
        return None
    elsewhere = [state for state in states if state.current is None and state.life != "left" and state not in waiting]
    if elsewhere and waiting and min(state.waiting for state in waiting) >= REMARKABLE:
        return _told(states, elsewhere, final=False)
    return None


def late(states: Sequence[RankState], own: int) -> Diagnosis | None:
    """Diagnoses a collective that timed out: the culprits are the other live ranks that are in no collective."""
    culprits = [state for state in states if state.rank != own and state.life == "alive" and state.current is None]
    return _told(states, culprits, final=False) if culprits else None


def _parted_shared(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks whose newest collective differs from that of most ranks."""
    newest = {state.rank: max((entry.sequence for entry in _entries(state)), default=0) for state in states}
    number = max(newest.values(), default=0)
    at = {state.rank: state.snapshot.at(number) for state in states if state.snapshot is not None}
    kinds = {rank: entry.what for rank, entry in at.items() if entry is not None}
    if len(set(kinds.values())) < 2:
        return []
    said = list(kinds.values())
    usual = max(said, key=lambda kind: (said.count(kind), -said.index(kind)))
    return [state for state in states if state.rank in kinds and kinds[state.rank] != usual]


def _parted(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that are in another operation than most ranks (at a tie: than the lowest rank)."""
    kinds = [_kind(state.current) for state in states]
    if len(set(kinds)) < 2:
        return []
    usual = max(kinds, key=lambda kind: (kinds.count(kind), -kinds.index(kind)))
    return [state for state, kind in zip(states, kinds, strict=True) if kind != usual]


def _kind(entry: RecordedOperation | None) -> tuple[str, str, int]:
    return ("", "", 0) if entry is None else (entry.operation, entry.detail, entry.sequence)


def _told(states: Sequence[RankState], culprits: Sequence[RankState], *, final: bool) -> Diagnosis:
    missing = ", ".join(str(state.rank) for state in culprits)
    plural = "s" if len(culprits) > 1 else ""
    waiters = [state for state in states if state.current is not None and state not in culprits]
    first = waiters[0].current if waiters else None
    subject = f"{first.what} at {first.site}" if first is not None else "a collective"
    verb = "will not come to" if final else "has not come to" if not plural else "have not come to"
    lines = [f"rank{plural} {missing} {verb} {subject}"]
    lines += [f"  {describe(state)}" for state in states]
    split = first_difference(states)
    if split:
        lines += ["  the ranks parted here:", *(f"    {line}" for line in split)]
    if final:
        lines += question(states)
    return Diagnosis(tuple(state.rank for state in culprits), "\n".join(lines), final)


def question(states: Sequence[RankState]) -> list[str]:
    """Returns a hint about `if is_main_process` if only rank 0 is known to have reached its call; otherwise no line.

    Ranks that failed, have ended or have made the same call before did not skip the call because of a condition.
    """
    main, *others = sorted(states, key=lambda state: state.rank)
    if main.rank != 0 or main.current is None or not others:
        return []
    site = main.current.site
    for state in others:
        if state.snapshot is None or state.reason or state.life not in ("alive", "left"):
            return []
        if any(entry.site == site for entry in _entries(state)):
            return []
    return [
        f"  only rank 0 has come to {main.current.operation} at {site}: does it stand inside "
        "`if accelerator.is_main_process:`? all ranks must call it"
    ]


def place(state: RankState, progress: tuple[int, int]) -> SourcePlace:
    """Returns the progress of the rank of ``state`` relative to a rank with ``progress``."""
    inside_later = state.current is not None and state.current.sequence > progress[0]
    passed = inside_later or state.is_gone
    ahead = state.last is not None and state.last.progress > progress
    return SourcePlace(describe(state), passed, ahead, state.idle)


def describe(state: RankState) -> str:
    """Formats the state of one rank as one line."""
    life = {
        "alive": f" cannot go on ({state.reason});" if state.reason else "",
        "stopped": f" is stopped (for {state.lasting:.0f} s, as by SIGSTOP);",
        "silent": f" has not been heard of for {state.lasting:.0f} s;",
        "dead": " is dead (killed, or aborted);",
        "left": f" has ended{f' ({state.reason})' if state.reason else ''};",
    }[state.life]
    entry = state.current
    if entry is not None:
        number = f" #{entry.sequence}" if entry.sequence else ""
        verb = {"dead": "was", "left": "was", "silent": "was last seen"}.get(state.life, "is")
        place = f" {verb} in {entry.what}{number} at {entry.site}"
    else:
        said = "" if state.snapshot is None else state.snapshot.said
        last = "" if state.last is None else f", after {state.last.what} at {state.last.site}"
        if state.life == "left":
            place = last.removeprefix(",") or " before any collective"
        else:
            seen = " was last seen at" if state.life != "alive" else " is at"
            if state.waiting and state.current is None:
                seen = " waits for a collective on its device at"
            place = f"{seen} {said or 'an unknown place'}{last}"
    return f"rank {state.rank}{life}{place}"


def first_difference(states: Sequence[RankState]) -> list[str]:
    """Returns the first recorded collective in which the ranks differ: one line per rank, empty if there is none."""
    known = [state for state in states if state.snapshot is not None]
    if len(known) < 2:
        return []
    numbers = sorted({entry.sequence for state in known for entry in _entries(state) if entry.sequence})
    for number in numbers:
        entries = {state.rank: state.snapshot.at(number) for state in known if state.snapshot is not None}
        there = {rank: entry for rank, entry in entries.items() if entry is not None}
        if len(there) > 1 and len({(entry.operation, entry.detail, entry.site) for entry in there.values()}) > 1:
            return [f"rank {rank}: {entry.what} #{number} at {entry.site}" for rank, entry in there.items()]
    return []


def _entries(state: RankState) -> tuple[RecordedOperation, ...]:
    return () if state.snapshot is None else state.snapshot.entries
