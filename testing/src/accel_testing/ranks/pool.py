"""Pool of rank processes: started once, used for many tests, replaced when one of them hangs or dies."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, final

from accel_launch.notebook.pickle_by_value import dumps, loads
from accel_testing.errors import LeakError, RankDied, RankError, RankHung
from accel_testing.ranks.environment import changed_variables, rank_environment
from accel_testing.ranks.launched_ranks import LaunchedRanks
from accel_testing.ranks.launchers import free_port
from accel_testing.ranks.processes import Rank
from accel_testing.ranks.sources import ForkedRanks, Ranks
from accel_testing.ranks.stacks import describe_exit, describe_place
from accel_testing.ranks.wire import Answer, Call, Close, Job, ModuleSource, TestCall, source_of

#: Seconds that work may take on the ranks before it counts as hung.
DEFAULT_TIMEOUT = 60.0
# Seconds that ranks have to answer once another has failed or died: the watchdog ends their wait, after it has looked
# up what is known of the others.
_GRACE = 15.0


@final
class RankPool:
    """Ranks of a gloo group on this machine, as many as a call needs, kept between calls.

    Nothing is started before the first call. Each call has its own process group, opened by an
    ``accel_state.Session`` at a free port, with its watchdog. Not thread-safe.
    """

    def __init__(
        self,
        size: int = 2,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        preload: Sequence[str] = (),
        launcher: str | None = None,
    ) -> None:
        """``size`` ranks and ``timeout`` seconds are the defaults of calls.

        ``preload`` names modules to import once, before the first job, beside torch: modules whose import is slow and
        starts no threads. ``launcher`` starts the ranks by ``accel`` or ``torchrun``; None forks each rank from its own
        server, which replaces a rank in milliseconds instead of seconds.
        """
        if size < 1:
            raise ValueError(f"a pool of {size} ranks; at least 1 is needed")
        self.size = size
        self.timeout = timeout
        self.preload = tuple(preload)
        self.launcher = launcher
        self._ranks: Ranks = ForkedRanks(preload) if launcher is None else LaunchedRanks(launcher, preload)
        self._team: list[Rank] = []

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        ranks: int | None = None,
        group: str | None = "gloo",
        timeout: float | None = None,
        checks: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on every rank; returns the results, by rank.

        ``fn`` may be a closure or lambda. ``group`` is the backend of the default process group opened around it, None
        for no group; ``variables`` are set meanwhile. Raises the error of the first failing rank, with the traceback of
        that rank as its cause; ``RankHung`` after ``timeout`` seconds, ``RankDied`` if a process ended,
        ``LeakError`` if one of ``checks`` (see ``accel_testing.faults.leaks``) found a leak.
        """
        size = self.size if ranks is None else ranks
        call = Call(dumps((fn, args, kwargs)))
        answers = self.submit(
            call,
            source_of(fn),
            ranks=size,
            backend=group,
            timeout=timeout or self.timeout,
            checks=tuple(checks),
            variables=variables,
        )
        if failed := first_failure(answers):
            raise rebuilt(*failed)
        return [loads(answer.value) for answer in answers]

    def submit(
        self,
        work: Call | TestCall,
        source: ModuleSource | None,
        *,
        ranks: int,
        backend: str | None = "gloo",
        timeout: float = DEFAULT_TIMEOUT,
        checks: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """Runs ``work`` on the first ``ranks`` ranks and returns their answers; the basis of ``run``."""
        changed = changed_variables(self._ranks.prepare(ranks), rank_environment(os.environ))
        team = self._team = self._ranks.team(ranks)
        port = free_port()
        try:
            for rank, process in enumerate(team):
                process.send(
                    Job(
                        work=work,
                        source=source,
                        rank=rank,
                        world_size=ranks,
                        port=port,
                        backend=backend,
                        timeout=timeout,
                        variables={**changed, **(variables or {})},
                        folder=os.getcwd(),
                        search_path=tuple(sys.path),
                        checks=checks,
                    )
                )
            answers = self._collect(team, timeout)
            left = self._settle(team)
        except BaseException:
            # After an interrupt, hang or death the state of the ranks is unknown, so they are discarded.
            self._ranks.discard()
            raise
        _raise_leaks(answers, left)
        return answers

    def prepare(self) -> None:
        """Starts importing torch in the background, so that the first call need not wait for it."""
        self._ranks.prepare(self.size)

    def output(self, rank: int, *, limit: int = 20_000) -> str:
        """Last ``limit`` bytes of a rank's output in the last call (stdout and stderr interleaved)."""
        return self._team[rank].output(limit) if rank < len(self._team) else ""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the last call's ranks, by rank; empty before the first call."""
        return tuple(rank.pid for rank in self._team)

    def close(self) -> None:
        """Ends all ranks; a later call starts new ones."""
        self._ranks.close()
        self._team = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, team: list[Rank], timeout: float) -> list[Answer]:
        """Every rank's answer, or the error that names the ranks without one."""
        answers: dict[int, Answer] = {}
        dead: dict[int, str] = {}
        began = time.monotonic()
        deadline = began + timeout
        while len(answers) + len(dead) < len(team):
            waiting = {process.connection: rank for rank, process in enumerate(team) if rank not in {**answers, **dead}}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answer = team[rank].receive()
                if answer is None:
                    dead[rank] = describe_exit(team[rank].exit_status(2.0))
                else:
                    answers[rank] = answer
                if answer is None or answer.outcome != "passed":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if len(answers) < len(team):
            raise _unanswered(team, answers, dead, seconds=time.monotonic() - began)
        return [answers[rank] for rank in range(len(team))]

    def _settle(self, team: list[Rank]) -> list[tuple[str, ...]]:
        """Makes all ranks leave the group; returns the leaks of each."""
        for process in team:
            process.send(Close())
        left: list[tuple[str, ...]] = []
        for rank, process in enumerate(team):
            closed = process.receive_closed(_GRACE)
            if closed is None:
                if (status := process.exit_status(0.5)) is not None:
                    raise RankDied(f"rank {rank} {describe_exit(status)} while it left its process group")
                place = process.place()
                raise RankHung(f"rank {rank} has not left its process group in {_GRACE:.0f} s; it stands {place}")
            left.append(closed.leaks)
        return left


def first_failure(answers: Sequence[Answer]) -> tuple[Answer, int] | None:
    """The answer that determines the failure, with its rank: a failure before a skip, an earlier before a later one."""
    bad = [(answer, rank) for rank, answer in enumerate(answers) if answer.outcome != "passed"]
    return min(bad, key=lambda pair: (pair[0].outcome != "failed", pair[0].at), default=None)


def rebuilt(answer: Answer, rank: int) -> BaseException:
    """Exception of a rank, of its own type if that can be rebuilt, with the rank's traceback as its cause."""
    if answer.outcome in ("skipped", "xfailed"):
        import pytest

        kind = pytest.skip.Exception if answer.outcome == "skipped" else pytest.xfail.Exception
        return kind(answer.reason)
    story = RankError(f"rank {rank} raised {answer.reason}\n\n{answer.report}")
    if not answer.value:
        return story
    error: BaseException = loads(answer.value)
    error.__cause__ = story
    error.add_note(f"raised on rank {rank}")
    return error


def _raise_leaks(answers: list[Answer], left: list[tuple[str, ...]]) -> None:
    if any(answer.outcome == "failed" for answer in answers) or not any(left):
        return
    by_leak: dict[str, list[int]] = {}
    for rank, leaks in enumerate(left):
        for leak in leaks:
            by_leak.setdefault(leak, []).append(rank)
    lines = [f"  on {name_ranks(ranks)}: {leak}" for leak, ranks in by_leak.items()]
    raise LeakError("\n".join(["left behind:", *lines]))


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unanswered(team: list[Rank], answers: dict[int, Answer], dead: dict[int, str], *, seconds: float) -> RankError:
    """Error for ranks that died or did not answer, with the stacks of all and the answers of the others."""
    missing = [rank for rank in range(len(team)) if rank not in answers and rank not in dead]
    conditions = {rank: team[rank].condition() for rank in missing}
    for rank in missing:
        team[rank].request_stacks()
    failed = [rank for rank, answer in answers.items() if answer.outcome == "failed"]
    lines = [f"rank {rank} {how}" for rank, how in dead.items()]
    lines += [f"rank {rank} raised {answers[rank].reason}" for rank in failed]
    dumps = {rank: team[rank].stacks() for rank in missing}
    since = "" if dead or failed else f" in {seconds:.0f} s"
    for rank in missing:
        lines.append(f"rank {rank} did not answer{since}{conditions[rank]}; it stands {describe_place(dumps[rank])}")
    if done := [rank for rank, answer in answers.items() if answer.outcome != "failed"]:
        lines.append(f"{name_ranks(done)} had finished")
    for rank in failed:
        lines += ["", f"--- rank {rank} raised ---", answers[rank].report]
    for rank, dump in dumps.items():
        lines += ["", f"--- stacks of rank {rank} ---", dump.partition("\n")[2].rstrip() or "(none could be read)"]
    kind = RankDied if dead else RankError if failed else RankHung
    return kind("\n".join(lines))
