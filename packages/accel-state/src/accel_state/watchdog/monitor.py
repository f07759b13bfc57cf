"""Hang watchdog: a thread that writes heartbeats and, while this rank waits, finds the culprit."""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import AccelError, CollectiveError, CollectiveMismatchError, is_relayed
from accel_state.private import backends_by_device
from accel_state.watchdog import decorator as active
from accel_state.watchdog.call_record import FREED, difference, failures, problem
from accel_state.watchdog.diagnosis import (
    REMARKABLE,
    STALLED,
    Diagnosis,
    RankState,
    SourcePlace,
    diagnose,
    first_difference,
    late,
    place,
    question,
)
from accel_state.watchdog.flight_recorder import DeviceWait, flight_record
from accel_state.watchdog.machines import MachineComparison
from accel_state.watchdog.operation_record import Record, describe_place, is_library
from accel_state.watchdog.peer_states import LEFT, PeerStates

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PULSE = 0.5
_DISTANT_PULSE = 2.0
_GRACE = 5.0
_MEETING = 5.0
_SEARCH = 6.0
_ENDED_BADLY = 1
_NAME = "accel-watchdog"
_STARTER = os.path.join("accel_launch", "launch", "child_main.py")
_PRECEDENCE = 3.0
"""Seconds that a rank whose error only follows from another's waits for the end of that rank."""


@final
class Watchdog:
    """Watchdog over the ranks of one group, while the group is open."""

    def __init__(self, group: "ProcessGroup") -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.record = Record()
        self._group: ProcessGroup | None = group
        self._rank, self._size = group.rank(), group.size()
        store = PrefixStore("accel/watchdog", group.get_group_store().clone())  # type: ignore[attr-defined]
        self._peers = PeerStates(store, self._rank, self._size, self.record)
        self.main = threading.main_thread().ident or 0
        self._finding: Diagnosis | None = None
        self._patience = REMARKABLE
        self._process = os.getpid()
        self._closed = threading.Event()
        self._informed = threading.Event()
        self._lock = threading.Lock()
        self._memories: list[Any] = []
        self._shown_by = sys.excepthook
        self._comparison: MachineComparison | None = None
        self._alone = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"{_NAME}{name}", daemon=True)
            for target, name in ((self._watch, ""), (self._correspond, "-messages"))
        ]

    def start(self) -> "Watchdog":
        """Starts the threads once all ranks have registered, so that every collective from the first on is compared.

        Ranks that do not register within a few seconds are added later.
        """
        self.record.beat(describe_place(self.main))
        self._meet()
        for thread in self._threads:
            thread.start()
        active.add(self)
        atexit.register(self.close)
        self._shown_by, sys.excepthook = sys.excepthook, self._uncaught
        return self

    def _meet(self) -> None:
        deadline, pause = time.monotonic() + _MEETING, 1e-3
        with contextlib.suppress(RuntimeError):  # the threads meet the same error and continue without the store
            self._peers.meet()
            while not self._peers.complete and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                self._peers.meet()
        self._memories = self._peers.memories
        if self._peers.complete:
            self._informed.set()

    def close(self) -> None:
        """Records that this rank ends, with the reason, and stops the threads. Further calls do nothing."""
        if self._closed.is_set() or os.getpid() != self._process:  # a forked child is not the rank
            return
        self._closed.set()
        active.remove(self)
        if sys.excepthook == self._uncaught:  # otherwise a later hook has replaced this one, and may call it
            sys.excepthook = self._shown_by
        atexit.unregister(self.close)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_GRACE)
        farewell = _farewell()
        self.record.beat(LEFT + farewell)
        if not any(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(RuntimeError):
                if self._peers.scattered or farewell:  # ranks that have not mapped the memory yet cannot map it later
                    self._peers.send()
                    if self._rank == 0:  # this process may serve the store, which ends with it
                        self._peers.outlast(2 * _PULSE)
                self._peers.stop_asking()
            self._peers.close()
            self.record.close()
            self._group = self._comparison = (
                None  # so that a process forked later does not inherit the group's connections
            )

    def concerns(self, group: Any) -> bool:
        """Whether an operation in ``group`` (None: the default group) is a collective of all ranks."""
        return group is None or (hasattr(group, "size") and group.size() == self._size)

    def enter(self, operation: str, detail: str = "", *, shared: bool, counted: bool = False) -> None:
        """Records the beginning of an operation on the main thread, and compares it with the other ranks.

        Raises:
            CollectiveMismatchError: a rank of this machine has entered another operation in its place, or a rank of
                another machine has done so before the last ``compare``.
        """
        self.record.enter(operation, detail, shared=shared, counted=counted)
        problem = None
        if shared and self._memories and self.record.differs(self._memories):
            problem = self._mismatch()
        elif self._comparison is not None and self._comparison.pending:
            try:
                problem = self._comparison.difference(self.record)
            except RuntimeError as error:  # a rank has ended, or is in another operation
                self.record.leave()
                self.explain(error)
                raise
        if problem is not None:
            self.record.withdraw()
            self.record.leave()
            raise CollectiveMismatchError(problem)

    def begin_call(self, ranks: Sequence[int], kind: str, needed: Sequence[int] = ()) -> None:
        """Records a call that all of ``ranks`` (of the watchdog's group) make together, and compares its kind.

        Ranks that wait in a call of another kind, or for one of ``needed`` that failed, are freed by their watchdogs.

        Raises:
            CollectiveMismatchError: a rank has begun this call with another kind; names the kinds and their ranks.
        """
        if threading.get_ident() == self.main:
            call = self.record.calls.begin(ranks, kind, needed)
            differs = difference(call, self._rank, self._peers.calls(call))
            if differs is not None:
                self.record.calls.end()  # the others read it nevertheless
                raise CollectiveMismatchError(differs)

    def compare_machines(self) -> None:
        """Enables ``compare`` between ranks of several machines, if there are several.

        Collective: every rank of the group must call this.
        """
        from accel_state.collectives.objects import all_gather_object
        from accel_state.process_group.group import sibling_group

        if self._comparison is None and any(all_gather_object(self._peers.scattered, group=self._group)):
            assert self._group is not None
            self._comparison = MachineComparison(sibling_group(self._group, backend="gloo"))

    def compare(self) -> None:
        """Starts a comparison of the collectives so far; the next operation fails if the ranks differ.

        Collective: every rank of the group must call this.
        """
        if self._comparison is not None and not self._comparison.pending:
            self._comparison.begin(self.record)

    def explain(self, error: Exception) -> None:
        """Replaces an error that a broken connection caused by one that reports the state of the other ranks.

        Raises:
            CollectiveError: naming the ranks that have ended or are elsewhere; returns without raising if there is
                none.
        """
        broken = active.broken_connection(error)
        if broken is None:
            return
        deadline = time.monotonic() + _SEARCH
        found = self._finding
        if found is None and (call := self.record.calls.current) is not None:
            others = self._peers.calls(call)
            text = difference(call, self._rank, others) or failures(others)
            found = None if text is None else Diagnosis((), text, final=True)
        while found is None and time.monotonic() < deadline and not self._closed.is_set():
            # Before all ranks have registered, the diagnosis would blame a registered rank for one that is still
            # missing.
            informed = self._informed.is_set() or deadline - time.monotonic() < _SEARCH / 2
            found = diagnose(self._look(), lost=True) if informed else None
            if found is None or not found.final:
                found = late(self._look(), self._rank) if informed and active.has_timed_out(broken) else None
                if found is not None:
                    break
                time.sleep(0.1)
        if found is not None:
            raise CollectiveError(f"{found.text}\n(the group said: {str(broken).splitlines()[0][:200]})") from error

    def places(self) -> dict[int, SourcePlace]:
        """Returns the progress of the other ranks relative to this one, which waits for them before a collective."""
        progress = self.record.progress
        return {state.rank: place(state, progress) for state in self._look() if state.rank != self._rank}

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Adds the state of the other ranks to an uncaught error.

        The model or the program may have waited for other ranks in operations of torch itself, which are not recorded.
        """
        if not isinstance(error, AccelError) and isinstance(error, Exception) and not self._closed.is_set():
            try:
                self.explain(error)
            except CollectiveError as found:
                error.add_note(str(found))
        if is_relayed(error) and not self._closed.is_set():
            # A launcher (torchrun, a scheduler) blames the rank that ends first.
            self._peers.await_end(_PRECEDENCE)
        self._shown_by(kind, error, trace)

    def _mismatch(self) -> str | None:
        states = self._look()
        sequence = self.record.sequence
        entries = {state.rank: state.snapshot.at(sequence) for state in states if state.snapshot is not None}
        there = {rank: entry for rank, entry in entries.items() if entry is not None}
        if len({entry.what for entry in there.values()}) < 2:
            return None
        lines = [f"rank {rank}: {entry.what} at {entry.site}" for rank, entry in sorted(there.items())]
        text = f"the ranks entered different operations as their collective #{sequence}:\n  " + "\n  ".join(lines)
        split = first_difference(states)
        if split and f" #{sequence} at " not in split[0]:
            text += "\n  They parted earlier:\n    " + "\n    ".join(split)
        return "\n".join([text, *question(states)])

    def _look(self) -> list[RankState]:
        said = active.troubles()
        with self._lock:
            states = self._peers.look()
        return [replace(state, reason=said[state.rank]) if state.rank in said else state for state in states]

    def _watch(self) -> None:
        device, looked = DeviceWait(), time.monotonic()
        while not self._closed.wait(self._pause):
            now = time.monotonic()
            if now - looked > STALLED:  # stopped or frozen meanwhile, by a debugger or a scheduler, and often all ranks
                device = DeviceWait()
                with self._lock:
                    self._peers.restart()
            looked = now
            place = describe_place(self.main)
            self.record.beat(place, on_device=device.since(place, now))
            states = self._look()
            if states[0].life in ("left", "dead"):
                self._alone.set()
            own = states[self._rank]
            self._compare_calls(own)
            if own.waiting >= STALLED:
                self._examine(states)
            else:
                self._patience = REMARKABLE

    def _correspond(self) -> None:
        """Exchanges records with ranks of other machines, as long as there are any and rank 0's store answers.

        A store whose process is stopped blocks this thread, but not the thread that watches.
        """
        sent = 0.0
        try:
            while not self._closed.wait(self._pause) and not self._alone.is_set():
                if not self._peers.complete:
                    self._peers.meet()
                    self._memories = self._peers.memories
                if self._peers.complete:
                    self._informed.set()
                    if not self._peers.scattered:
                        return
                    if time.monotonic() - sent > _DISTANT_PULSE:
                        self._peers.send()
                        sent = time.monotonic()
                    self._peers.receive()
            if self._alone.is_set():
                self._peers.stop_asking()
        except RuntimeError:
            self._informed.set()  # rank 0 has ended, so no further records can be received

    @property
    def _pause(self) -> float:
        return _PULSE if self._informed.is_set() else 0.05

    def _examine(self, states: list[RankState]) -> None:
        found = diagnose(states)
        if found is None:
            return
        waiting = [state.rank for state in states if state.waiting >= STALLED and state.rank not in found.culprits]
        speaks = self._rank == min(waiting, default=self._rank)
        if found.final:
            self._finding = found
            self._end(found, speaks=speaks)
        elif states[self._rank].waiting >= self._patience:
            self._patience *= 2
            if speaks:
                _say(f"{found.text}\n  (it may still come; this is said again after {self._patience:.0f} s)")

    def _compare_calls(self, own: RankState) -> None:
        """Ends the wait of this rank in a call that another rank makes in another way, or cannot finish."""
        call = self.record.calls.current
        if call is None or self._finding is not None:
            return
        text = problem(call, self._rank, self._peers.calls(call), waits=own.idle >= STALLED)
        if text is not None:
            self.record.calls.fail(FREED + text)
            self._finding = Diagnosis((), text, final=True)
            self._end(self._finding, speaks=True)

    def _end(self, found: Diagnosis, *, speaks: bool) -> None:
        """Makes the collective that this rank waits in fail; ends the process if it stays in that collective.

        A rank that waits for its device, outside of a recorded operation, is free once its main thread moves.
        """
        # A culprit that waits may end the wait before any other rank does, so it prints the report before its stacks
        # too.
        if speaks or self._rank in found.culprits:
            _say(found.text)
        _say(f"stacks of rank {self._rank}:\n{_stacks()}{flight_record()}")
        before, stood = self.record.read().current, describe_place(self.main)
        if self._group is not None:
            _break_connections(self._group)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            if self._closed.wait(0.05):
                return
            now = self.record.read().current
            if before is None:
                if now is not None or describe_place(self.main) != stood:
                    return
            elif now is None or now.number != before.number:
                return
        _say(f"rank {self._rank} cannot be freed from its collective and is ended")
        sys.stderr.flush()
        os._exit(_ENDED_BADLY)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"accel: {text}\n")
        sys.stderr.flush()


def _farewell() -> str:
    """Returns the error that ends this process, with its source line; empty if there is none."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    place, trace = "", error.__traceback__
    while trace is not None:
        if not is_library(trace.tb_frame):
            place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}{place}"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if not names.get(ident, "").startswith(_NAME):
            lines = [one for one in traceback.extract_stack(frame)[-14:] if not _starts(one)]
            parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_list(lines))}")
    return "".join(parts)


def _starts(frame: traceback.FrameSummary) -> bool:
    """Whether a frame belongs to program start: runpy, or the launcher's main module."""
    return frame.filename == "<frozen runpy>" or frame.filename.endswith(_STARTER)


def _break_connections(group: "ProcessGroup") -> None:
    """Makes pending collectives of the group fail: aborts NCCL; gloo has no abort, so its sockets are shut down."""
    import socket
    import stat

    for backend in backends_by_device(group):
        with contextlib.suppress(RuntimeError):
            backend.abort()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)
