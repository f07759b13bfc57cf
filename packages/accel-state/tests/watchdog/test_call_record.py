"""Ranks that make one call together read each other's records of it."""

from mmap import mmap

from accel_state.watchdog.call_record import CALLS_SIZE, FREED, CallRecord, CommonCall, difference, problem, read_call


def ranks(*kinds: str, needed: tuple[int, ...] = ()) -> tuple[list[mmap], list[CallRecord], list[CommonCall]]:
    memories = [mmap(-1, CALLS_SIZE + 8) for _ in kinds]
    calls = [CallRecord(memory, 8) for memory in memories]
    everybody = range(len(kinds))
    return memories, calls, [one.begin(everybody, kind, needed) for one, kind in zip(calls, kinds, strict=True)]


def seen(memories: list[mmap], call: CommonCall, own: int) -> dict[int, CommonCall]:
    found = {rank: read_call(memory, 8, call) for rank, memory in enumerate(memories) if rank != own}
    return {rank: one for rank, one in found.items() if one is not None}


def test_kinds_are_compared_by_call_and_not_by_time() -> None:
    memories, calls, (first, *_) = ranks("with", "with", "without")
    text = difference(first, 0, seen(memories, first, 0))
    assert text is not None
    assert text.startswith("with on ranks 0, 1, and without on ranks 2: ranks 0, 1, 2 make this call together")
    later = calls[0].begin(range(3), "without")
    assert seen(memories, later, 0) == {}  # the others have not come to it
    other = calls[0].begin(range(2), "without")  # the first call of other ranks
    assert difference(other, 0, seen(memories, other, 0)) is None
    again = calls[1].begin(range(3), "without")
    assert difference(again, 1, seen(memories, again, 1)) is None


def test_a_failure_of_a_needed_rank_ends_a_wait_and_then_those_of_all_ranks() -> None:
    memories, calls, (waiting, *_) = ranks("call", "call", "call", needed=(1,))
    calls[2].fail("failed elsewhere")
    assert problem(waiting, 0, seen(memories, waiting, 0), waits=True) is None
    calls[1].fail("failed in its experts")
    calls[1].fail("failed later")
    others = seen(memories, waiting, 0)
    assert problem(waiting, 0, others, waits=False) is None
    text = problem(waiting, 0, others, waits=True)
    assert text == "rank 1 failed in its experts"
    assert calls[2].current is not None
    last = calls[2].current
    calls[0].fail(FREED + text)
    found = problem(last, 2, seen(memories, last, 2), waits=True)
    assert found == "rank 1 failed in its experts"
    calls[0].end()
    calls[0].fail("nothing")  # of no call
    assert seen(memories, last, 2)[0].failure == FREED + text


def test_forgotten_calls_are_not_compared() -> None:
    memories, calls, (first, _) = ranks("with", "without")
    for _ in range(40):
        calls[1].begin(range(2), "without")
    assert seen(memories, first, 0) == {}
