"""The hang watchdog's record, and what it concludes from what is known of every rank."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed import HashStore

from accel_state import Session, private
from accel_state.collectives import tensors as collectives
from accel_state.errors import CollectiveError, CollectiveMismatchError
from accel_state.watchdog import monitor, peer_states
from accel_state.watchdog.decorator import (
    Recording,
    _active,
    broken_connection,
    outline,
    recorded,
    troubled,
    untroubled,
)
from accel_state.watchdog.diagnosis import (
    PATIENCE,
    REMARKABLE,
    STALLED,
    Life,
    RankState,
    describe,
    diagnose,
    place,
    question,
)
from accel_state.watchdog.flight_recorder import DeviceWait, flight_record, flights
from accel_state.watchdog.operation_record import SLOTS, Record, RecordedOperation, RecordSnapshot, decode
from accel_state.watchdog.peer_states import LEFT, PeerStates, Watched, _shows_end


def entry(
    operation: str, site: str, *, sequence: int = 7, detail: str = "", ended: float | None = None
) -> RecordedOperation:
    return RecordedOperation(sequence, sequence, operation, detail, site, 1.0, ended)


def state(
    rank: int,
    *entries: RecordedOperation,
    waiting: float = 0.0,
    life: Any = "alive",
    lasting: float = 99.0,
    reason: str = "",
):
    snapshot = RecordSnapshot(entries, 1.0, 1.0, f"train.py:{rank}")
    return RankState(rank, life, lasting, snapshot, waiting, reason)


GATHER, BARRIER = entry("gather", "a.py:1"), entry("barrier", "b.py:2")
LONG = PATIENCE + REMARKABLE


@pytest.mark.parametrize(
    ("states", "culprits", "final"),
    [
        ([state(0, GATHER, waiting=LONG), state(1, BARRIER, waiting=LONG), state(2, GATHER, waiting=LONG)], (1,), True),
        ([state(0, GATHER, waiting=LONG), state(1, GATHER, life="dead")], (1,), True),
        ([state(0, GATHER, waiting=LONG), state(1, life="left")], (1,), True),
        ([state(0, GATHER, waiting=LONG), state(1, GATHER, life="stopped")], (1,), True),
        ([state(0, GATHER, waiting=LONG), state(1)], (1,), False),
        ([state(0, GATHER, waiting=LONG), state(1, reason="cannot read"), state(2)], (1,), True),
        (
            [
                state(0, GATHER, waiting=LONG),
                state(1, GATHER, life="left", reason="CollectiveError: rank 2"),
                state(2, life="dead"),
            ],
            (2,),
            True,
        ),
    ],
    ids=[
        "other operation",
        "dead",
        "left",
        "stopped",
        "elsewhere",
        "in trouble",
        "a consequence",
    ],
)
def test_the_rank_to_blame_is_found(states: list[RankState], culprits: tuple[int, ...], final: bool) -> None:
    found = diagnose(states)
    assert found is not None
    assert (found.culprits, found.final) == (culprits, final)
    assert f"rank {culprits[0]}" in found.text
    assert "a.py:1" in found.text


@pytest.mark.parametrize(
    "states",
    [
        [state(0), state(1)],
        [state(0, GATHER, waiting=STALLED), state(1, reason="cannot read")],
        [state(0, GATHER, waiting=LONG), state(1, GATHER, waiting=LONG, reason="could not read")],
        [state(0, GATHER, waiting=STALLED / 2), state(1)],
        [state(0, GATHER, waiting=LONG), state(1, GATHER, waiting=LONG)],
        [state(0, GATHER, waiting=LONG), state(1, BARRIER, waiting=0.0)],
        [state(0, GATHER, waiting=REMARKABLE - 1), state(1)],
        [state(0, GATHER, waiting=LONG), state(1, GATHER, waiting=LONG, life="stopped", lasting=PATIENCE / 2)],
    ],
    ids=[
        "nobody waits",
        "in trouble just now",
        "together in spite of trouble",
        "not for long",
        "together",
        "the other is busy",
        "the other may come",
        "stopped just now",
    ],
)
def test_what_may_come_right_is_left_alone(states: list[RankState]) -> None:
    assert diagnose(states) is None


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        ([state(0, GATHER), state(1, BARRIER)], True),
        ([state(0, GATHER), state(1, life="left"), state(2, BARRIER)], True),
        ([state(0, GATHER), state(1, replace(GATHER, ended=2.0), BARRIER)], False),
        ([state(0, GATHER), state(1, life="left", reason="ValueError: boom")], False),
        ([state(0, GATHER), state(1, life="dead")], False),
        ([state(0), state(1, BARRIER)], False),
        ([state(0, GATHER), state(1, GATHER), state(2, BARRIER)], False),
    ],
    ids=["elsewhere", "ended", "was there before", "raised", "killed", "not in a call", "another is there"],
)
def test_a_call_that_only_rank_0_makes_raises_the_question_of_a_condition(states: list[RankState], asked: bool) -> None:
    found = "\n".join(question(states))
    assert ("only rank 0" in found) == asked
    assert ("gather at a.py:1" in found and "if accelerator.is_main_process" in found) == asked


@pytest.fixture
def record() -> Any:
    record = Record()
    yield record
    record.close()


def test_a_record_keeps_the_newest_operations_with_their_places(record: Record) -> None:
    for number in range(SLOTS + 5):
        record.enter("gather", f"float32[{number}]", shared=True)
        line = sys._getframe().f_lineno - 1
        record.leave()
    record.enter("backward", "", shared=False)
    seen = record.read()
    assert len(seen.entries) == SLOTS
    assert seen.current is not None
    assert seen.current.operation == "backward"
    last = seen.at(SLOTS + 5)
    assert last is not None
    assert last.what == f"gather(float32[{SLOTS + 4}])"
    assert last.site.endswith(f"test_watchdog.py:{line}")
    record.leave()
    assert record.read().current is None


def test_parts_of_an_operation_have_no_number_of_their_own(record: Record) -> None:
    record.enter("save_state", "", shared=True)
    record.enter("agree", "", shared=True)
    assert [one.sequence for one in record.read().entries] == [1, 0]
    record.leave()
    record.leave()
    record.enter("gather", "", shared=True)
    record.withdraw()
    record.leave()
    record.enter("reduce", "", shared=True)
    assert record.sequence == 2


def test_what_ranks_do_together_within_what_each_does_by_itself_is_numbered(record: Record) -> None:
    record.enter("backward", "", shared=False)
    for _ in range(2):
        record.enter("gather", "", shared=True)
        record.enter("agree", "", shared=True)
        record.leave()
        record.leave()
    assert [one.sequence for one in record.read().entries] == [0, 1, 0, 2, 0]
    record.leave()
    assert not record.inside


def test_progress_counts_what_all_do_equally_often_since_the_last_common_operation(record: Record) -> None:
    def do(operation: str, *, shared: bool = False, counted: bool = False) -> None:
        record.enter(operation, "", shared=shared, counted=counted)
        record.leave()

    do("gather", shared=True)
    do("backward", counted=True)
    do("fetch")
    do("backward", counted=True)
    record.enter("reduce", "", shared=True)
    record.withdraw()
    record.leave()
    assert record.progress == (1, 2)
    assert [one.progress for one in record.read().entries] == [(1, 0), (1, 1), (1, 1), (1, 2), (1, 2)]


def test_a_place_tells_who_has_gone_past() -> None:
    now = entry("backward", "a.py:1", sequence=0)
    for progress, ahead in (((3, 1), False), ((3, 2), False), ((3, 3), True), ((4, 0), True)):
        found = place(state(1, replace(now, progress=progress)), (3, 2))
        assert (found.passed, found.ahead) == (False, ahead)
    assert place(state(1, replace(GATHER, sequence=4, progress=(4, 0))), (3, 2)).passed
    assert not place(state(1, replace(GATHER, sequence=4, progress=(4, 0), ended=2.0)), (3, 2)).passed
    assert place(state(1, life="left"), (3, 2)).passed
    assert place(state(1, life="dead"), (3, 2)).passed


@pytest.mark.parametrize("life", ["stopped", "silent"])
def test_nobody_waits_long_for_a_rank_that_is_stopped_or_silent(life: Life) -> None:
    assert not place(state(1, life=life, lasting=PATIENCE - 1), (3, 2)).passed
    assert place(state(1, life=life, lasting=PATIENCE), (3, 2)).passed


def test_texts_that_are_no_utf_8_are_recorded(record: Record) -> None:
    names: dict[str, Any] = {"record": record, "detail": "jos\udce9"}
    exec(compile("record.enter('gather', detail, shared=True)", "/jos\udce9/train.py", "exec"), names)
    current = record.read().current
    assert current is not None
    assert (current.detail, current.site) == (r"jos\udce9", r"/jos\udce9/train.py:1")
    record.beat("KeyError: '\udce9'")
    assert record.read().said == r"KeyError: '\udce9'"
    record.calls.begin([0, 1], "jos\udce9")
    assert outline({"\udce9" * 99: 1}) != outline({"\udce9" * 98: 1})


def test_an_error_that_is_its_own_cause_comes_of_no_connection() -> None:
    error = ValueError("boom")
    error.__cause__ = error
    assert broken_connection(error) is None


def test_a_record_is_written_by_the_main_thread_only(record: Record) -> None:
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(record.enter("gather", "", shared=True)))
    thread.start()
    thread.join()
    assert told == [False]


def test_a_beat_says_what_the_process_does(record: Record) -> None:
    record.beat("train.py:12")
    seen = decode(record.image())
    assert seen.said == "train.py:12"
    assert seen.beat <= time.monotonic()


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (torch.ones(2, 3), "float32[2, 3]"),
        ({"a": torch.ones(1, dtype=torch.int64), "b": [torch.ones(())]}, "{a: int64[1], b: [float32[]]}"),
        ("word", "str"),
    ],
)
def test_an_outline_tells_structure_dtypes_and_shapes(tree: Any, text: str) -> None:
    assert outline(tree) == text


def test_long_outlines_differ_where_their_ends_do() -> None:
    one = [torch.ones(2)] * 30
    assert outline(one) != outline([*one[:-1], torch.ones(3)])
    assert len(outline(one)) <= 80


def test_without_a_doctor_an_operation_is_called_as_it_is() -> None:
    assert not _active
    assert recorded("double", lambda value: str(value))(lambda value: 2 * value)(4) == 8


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no file descriptors of processes here")
@pytest.mark.parametrize("number", [None, 1500])
def test_the_end_of_a_process_shows_whatever_the_number_of_its_file(number: int | None) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = os.pidfd_open(process.pid)
        file = found if number is None else fcntl.fcntl(found, fcntl.F_DUPFD_CLOEXEC, number)
        try:
            assert not _shows_end(file)
            process.communicate(b"\n")
            assert _shows_end(file)
        finally:
            for one in {found, file}:
                os.close(one)


def test_a_killed_rank_is_dead_where_the_kernel_offers_no_descriptors_of_processes(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[record.descriptor]) as process:
        rank = Watched(1)
        rank.map(process.pid, record.descriptor, record.token.hex())
        assert rank.look().life == "alive"
        process.kill()
    assert rank.look().life == "dead"
    rank.close()


@pytest.mark.ranks(2, group=False)
def test_a_mismatch_is_an_error_before_anything_is_sent(rank: int) -> None:
    session = Session.open(cpu=True)
    assert session.lease is not None
    watchdog = session.lease.watchdog
    assert watchdog is not None
    deadline = time.monotonic() + 30
    while not watchdog._memories and time.monotonic() < deadline:
        time.sleep(0.01)
    collectives.gather(torch.ones(2))
    session.wait_for_everyone()
    if rank == 0:
        other = watchdog._peers.watched[1]
        while (seen := other.look().current) is None or seen.operation != "reduce":
            time.sleep(0.01)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: gather(.|\n)*rank 1: reduce"):
            collectives.gather(torch.ones(3))
    # What rank 0 does after its error meets what rank 1 waits in, and the two are together again.
    assert collectives.reduce(torch.ones(1), "sum").item() == 2.0
    collectives.gather(torch.ones(1))
    session.close()
    assert not _active
    assert "accel-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_left_before_it_was_met_is_known_by_its_last_message(record: Record) -> None:
    store = HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = PeerStates(store, 1, 2, record)
    store.set("who/1", json.dumps({**left._me, "pid": ended.pid}))
    record.enter("barrier", "", shared=True)
    record.beat(LEFT + "CollectiveMismatchError: at b.py:2")
    left.send()
    mine = Record()
    peers = PeerStates(store, 0, 2, mine)
    peers.meet()
    assert peers.look()[1].life == "dead"
    peers.receive()
    seen = peers.look()[1]
    assert (seen.life, seen.reason) == ("left", "CollectiveMismatchError: at b.py:2")
    assert seen.current is not None
    assert seen.current.operation == "barrier"
    peers.close()
    mine.close()


def test_silence_is_measured_anew_after_a_restart(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(peer_states, "time", SimpleNamespace(monotonic=lambda: now[0]))
    record.enter("barrier", "", shared=True)
    mine = Record()
    peers = PeerStates(HashStore(), 1, 2, mine)
    peers.watched[0].image = record.image()
    assert peers.look()[0].life == "alive"
    now[0] += LONG
    assert (peers.look()[0].life, peers.look()[0].lasting) == ("silent", pytest.approx(LONG))
    peers.restart()
    assert (peers.look()[0].life, peers.look()[0].waiting) == ("alive", 0.0)
    peers.close()
    mine.close()


@pytest.mark.ranks(2, group=False)
def test_time_in_which_this_process_did_not_run_is_no_silence_of_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.open(cpu=True)
    assert session.lease is not None
    assert session.lease.watchdog is not None
    if rank == 0:
        restarted = threading.Event()
        monkeypatch.setattr(session.lease.watchdog._peers, "restart", restarted.set)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + LONG, sleep=time.sleep)
        monkeypatch.setattr(monitor, "time", clock)  # as after SIGSTOP and SIGCONT
        assert restarted.wait(60)
    session.close()


@recorded("gather")
def losing_its_connection() -> None:
    raise RuntimeError("Connection closed by peer [192.0.2.1]:5252")


@recorded("gather")
def failing_by_itself() -> None:
    raise RuntimeError("shapes do not fit")


def test_an_operation_that_lost_its_peers_names_what_they_said_without_a_doctor_too() -> None:
    assert not _active
    troubled(3, "rank 3 cannot read")
    try:
        with pytest.raises(CollectiveError, match=r"rank 3 cannot read\n\(the group said: Connection closed"):
            losing_its_connection()
        with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
            failing_by_itself()
    finally:
        untroubled()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):
        losing_its_connection()


FLIGHTS = {
    "version": "2.10",
    "entries": [
        {
            "collective_seq_id": 7,
            "input_dtypes": ["Float"],
            "input_sizes": [[3, 2]],
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "retired": retired,
            "state": state,
            "time_created_ns": 97_500_000_000,
        }
        for state, retired in (("completed", True), ("started", False))
    ],
}


def test_a_flight_record_is_told_in_a_line_for_each_collective() -> None:
    assert list(flights(FLIGHTS, now=100.0)) == [
        "  #7 nccl:all_reduce(Float[3, 2]) in default_pg: done, begun 2.5 s ago",
        "  #7 nccl:all_reduce(Float[3, 2]) in default_pg: started, begun 2.5 s ago",
    ]
    assert list(flights({}, now=1.0)) == []


def record_reduced(device: str) -> str:
    torch.distributed.all_reduce(torch.ones(3, device=device))
    return flight_record()


@pytest.mark.ranks(2)
def test_torchs_own_record_of_collectives_is_read(rank: int) -> None:
    if Version(torch.__version__) < Version("2.10"):
        pytest.skip("torch 2.9 records nothing for gloo")
    told = record_reduced("cpu")
    assert told.splitlines()[0] == "the last collectives by torch's flight recorder:"
    assert "gloo:all_reduce(Float[3]) in default_pg: " in told.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.ranks(1, backend="nccl")
def test_nccls_own_record_of_collectives_is_read(rank: int) -> None:
    assert "nccl:all_reduce(Float[3])" in record_reduced("cuda").splitlines()[-1]


def test_a_recording_explains_errors_like_the_decorator_and_may_be_entered_inside_itself() -> None:
    recording = Recording("save_state", shared=False)
    with recording, recording:
        pass
    with pytest.raises(ValueError, match="mine"), recording:
        raise ValueError("mine")
    troubled(1, "rank 1 has no more memory")
    try:
        with pytest.raises(CollectiveError, match="rank 1 has no more memory"), recording:
            raise RuntimeError("connection reset by peer")
    finally:
        untroubled()


def unfinished(number: int) -> str:
    done = {"process_group": ["0", "default"], "collective_seq_id": number - 1, "retired": True}
    return json.dumps({"entries": [done, {**done, "collective_seq_id": number, "retired": False}]})


def test_a_thread_waits_for_a_device_that_stays_in_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [unfinished(3)]
    monkeypatch.setattr(private, "device_flight_recorder", lambda: lambda: found[-1])
    wait = DeviceWait()
    assert wait.since("train.py:3", 100.0) == 0.0
    assert wait.since("train.py:3", 100.0 + STALLED) == 0.0
    assert wait.since("train.py:3", 109.0) == 100.0 + STALLED
    found.append(unfinished(4))
    assert wait.since("train.py:3", 110.0) == 0.0
    assert wait.since("train.py:3", 111.0) == 110.0
    assert wait.since("train.py:4", 112.0) == 0.0
    found.append(json.dumps({"entries": []}))
    assert [wait.since("train.py:4", 112.0 + STALLED + more) for more in range(3)] == [0.0, 0.0, 0.0]


def test_a_wait_for_a_device_is_in_the_record(record: Record) -> None:
    mine = Record()
    record.beat("train.py:3", on_device=time.monotonic() - LONG)
    peers = PeerStates(HashStore(), 0, 2, mine)
    peers.watched[1].image = record.image()
    seen = peers.look()[1]
    assert seen.waiting == pytest.approx(LONG, abs=1.0)
    assert "waits for a collective on its device at train.py:3" in describe(seen)
    found = diagnose([state(0, life="dead"), seen])
    assert found is not None
    assert (found.culprits, found.final) == ((0,), True)
    late = diagnose([state(0), seen])
    assert late is not None
    assert (late.culprits, late.final) == ((0,), False)
    assert diagnose([replace(seen, rank=0), seen]) is None
    peers.close()
    mine.close()


@pytest.mark.slow
@pytest.mark.ranks(2, group=False)
def test_a_busy_rank_that_waits_for_its_device_learns_that_its_peer_is_stopped(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "device_flight_recorder", lambda: lambda: unfinished(3))
    session = Session.open(cpu=True)
    assert session.lease is not None
    assert session.lease.watchdog is not None
    watchdog = session.lease.watchdog
    if rank == 0:
        said, since = [], time.monotonic()
        monkeypatch.setattr(watchdog, "_end", lambda found, *, speaks: said.append(found))
        monkeypatch.setattr(
            watchdog, "_look", lambda: [*watchdog._peers.look()[:1], state(1, life="stopped", lasting=LONG)]
        )
        while not said and time.monotonic() - since < 60:  # busy, as a thread that waits for a CUDA device
            pass
        assert said
        assert said[0].culprits == (1,)
    session.close()
