"""Diagnoses from the known states of all ranks; nothing here reads a process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from accel_state.watchdog.operation_record import RecordedOperation, RecordSnapshot

Life = Literal["alive", "stopped", "silent", "dead", "left"]

STALLED = 3.0
"""Seconds inside one operation, without using the processor, after which a rank counts as waiting."""
PATIENCE = 5.0
"""Seconds for which a rank must have been stopped, or all must have been waiting, for it to be final."""
REMARKABLE = 8.0
"""Seconds of waiting for a rank that is alive and elsewhere, after which that is said (and nothing else is done)."""


@final
@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank: whether it lives (and for how long it has been so), and what it said.

    ``reason`` is why it left, or why it cannot go on although it lives. ``idle`` is for how many seconds it has stood
    still without using the processor, ``waiting`` the same where it is inside of an operation.
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


@final
@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where a rank is, as seen by one that waits for it before a common operation.

    Attributes:
        passed: it cannot come first: it has ended, or is inside of a later common operation.
        ahead: it has begun a counted operation, like backward, that the waiting rank has not.
        idle: seconds for which it has stood still without using the processor.
    """

    text: str
    passed: bool
    ahead: bool
    idle: float


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong: the ranks to blame, the text for people, and whether it can still come right by itself."""

    culprits: tuple[int, ...]
    text: str
    final: bool


def diagnose(states: Sequence[RankState], *, lost: bool = False) -> Diagnosis | None:
    """What keeps the waiting ranks waiting; None when nobody waits, or for no remarkable time.

    ``lost``: a collective has failed because a connection broke, so nobody need have waited.
    """
    waiting = [state for state in states if state.life == "alive" and state.waiting >= STALLED]
    if not waiting and not lost:
        return None
    gone = [state for state in states if state.life in ("dead", "left")]
    gone += [state for state in states if state.life in ("stopped", "silent") and state.lasting >= PATIENCE]
    if lost or min(state.waiting for state in waiting) >= PATIENCE:
        gone += [state for state in states if state.life == "alive" and state.reason and state.current is None]
    # Those that only failed because another had are no culprits.
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
    elsewhere = [state for state in states if state.current is None and state.life != "left"]
    if elsewhere and waiting and min(state.waiting for state in waiting) >= REMARKABLE:
        return _told(states, elsewhere, final=False)
    return None


def late(states: Sequence[RankState], own: int) -> Diagnosis | None:
    """The other ranks that are alive and in no collective, when one has failed because its time is over."""
    culprits = [state for state in states if state.rank != own and state.life == "alive" and state.current is None]
    return _told(states, culprits, final=False) if culprits else None


def _parted_shared(states: Sequence[RankState]) -> list[RankState]:
    """The ranks whose latest common operation is another one than that of most."""
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
    """The ranks that are in another operation than most (at a tie: than the lowest rank)."""
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
    """Asks for a condition around the call that rank 0 alone is in, as far as is known of every rank; else no line.

    Ranks that failed, were ended or have made the same call before did not pass by it because of a condition.
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
    """Where the rank of ``state`` is for one whose own progress is ``progress``."""
    inside_later = state.current is not None and state.current.sequence > progress[0]
    passed = inside_later or state.life in ("dead", "left")
    ahead = state.last is not None and state.last.progress > progress
    return SourcePlace(describe(state), passed, ahead, state.idle)


def describe(state: RankState) -> str:
    """One line about a rank."""
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
            place = f"{seen} {said or 'an unknown place'}{last}"
    return f"rank {state.rank}{life}{place}"


def first_difference(states: Sequence[RankState]) -> list[str]:
    """Where the ranks' common operations first differ, as far back as is known: one line for each rank."""
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
