"""Objects reach every rank, and a failure on one rank is a failure on all."""

import pickle
import threading
from typing import Any

import pytest
import torch

from accel_state import CollectiveError
from accel_state.collectives.objects import gather_at_first
from accel_state.collectives.tensors import agree, all_gather_object, broadcast_object_list, gather_object
from accel_testing.programs.runs import run_script


@pytest.mark.ranks(2)
def test_objects_come_in_order_of_rank(rank):
    assert all_gather_object({"rank": rank, "list": [rank]}) == [{"rank": 0, "list": [0]}, {"rank": 1, "list": [1]}]
    assert gather_object([rank]) == [0, 1]
    assert gather_object(["x"] * rank) == ["x"]
    assert gather_object((str(rank), torch.tensor(rank))) == ["0", torch.tensor(0), "1", torch.tensor(1)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("sizes", [(0, 1, 2), (600, 0, 480), (480, 600, 700), (490, 491, 492), (100_000, 3, 600)])
@pytest.mark.sampled(1)
def test_objects_of_any_sizes_arrive(rank, sizes):
    expected = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert all_gather_object(expected[rank]) == expected


@pytest.mark.ranks(2)
def test_every_size_around_what_one_collective_carries_arrives(rank):
    from accel_state.collectives.pickled import _INLINE

    for size in range(_INLINE - 40, _INLINE + 8):
        assert all_gather_object(b"a" * (size - rank)) == [b"a" * size, b"a" * (size - 1)]


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 + 1, 2**32 + 1])
def test_an_object_of_gigabytes_is_read(length: int) -> None:
    from accel_state.collectives.pickled import _as_object

    start = pickle.dumps({"rank": 1})
    received = torch.empty(length, dtype=torch.uint8)  # only its first page is ever in memory
    received[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    assert _as_object(received, length) == {"rank": 1}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_a_list_is_overwritten_in_place(rank, source):
    mine = [f"from {rank}", {"nested": rank}]
    assert broadcast_object_list(mine, source) is mine
    assert mine == [f"from {source}", {"nested": source}]


@pytest.mark.ranks(2, env={"ACCEL_HANG_DOCTOR": "off"})  # which is first otherwise
def test_a_list_of_another_length_is_refused(rank):
    if rank == 0:
        broadcast_object_list(["a", "b"])
    else:
        with pytest.raises(CollectiveError, match="of 1 objects, but process 0 sent 2"):
            broadcast_object_list([None])
    assert all_gather_object(rank) == [0, 1]


@pytest.mark.ranks(2)
def test_objects_travel_where_torch_has_no_numpy(rank, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "numpy", property(lambda tensor: pytest.fail("not there")), raising=False)
    assert all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object_list([{"rank": rank}], 1) == [{"rank": 1}]


@pytest.mark.parametrize("given", [{"a": 1}, "text", b"bytes", 3])
def test_what_is_not_a_list_is_refused_with_what_works(given):
    with pytest.raises(TypeError, match="all_gather_object"):
        gather_object(given)


def test_alone_everything_is_as_it_was():
    items = [1, 2]
    assert gather_object(items) is items
    assert broadcast_object_list(items) is items
    assert all_gather_object(items) == [items]
    agree(None)
    with pytest.raises(KeyError, match="mine"):
        agree(KeyError("mine"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("failing", [[], [2], [1, 3], [0, 1, 2, 3]])
@pytest.mark.sampled(1)
def test_no_rank_goes_on_when_one_has_failed(rank, failing):
    if not failing:
        agree(None)
    elif rank in failing:
        own = ValueError(f"disk of {rank} full")
        with pytest.raises(ValueError, match=f"disk of {rank} full") as caught:
            agree(own)
        assert caught.value is own
    else:
        with pytest.raises(CollectiveError) as caught:
            agree(None)
        for one in failing:
            assert f"process {one} failed with ValueError: disk of {one} full" in str(caught.value)
    assert all_gather_object(rank) == [0, 1, 2, 3]


HOLDS_THE_INTERPRETER = """
import sys
import torch
import torch.distributed as dist
from accel_state.collectives.objects import all_gather_object

dist.init_process_group("gloo")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
sys.setswitchinterval(60)  # gloo's threads cannot take the lock meanwhile
for _ in range(20):
    all_gather_object("the last collective")
dist.destroy_process_group()
"""


def test_a_program_may_end_right_after_a_collective(tmp_path):
    (tmp_path / "train.py").write_text(HOLDS_THE_INTERPRETER)
    run_script(tmp_path / "train.py", ranks=2, cwd=tmp_path, timeout=60).check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("large", [False, True])
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(rank: int, large: bool) -> None:
    given: Any = threading.Lock() if rank else "x" * (1000 if large else 1)
    expected = TypeError if rank else CollectiveError
    said = r"cannot pickle '_thread.lock' object"
    with pytest.raises(expected, match=said):
        all_gather_object(given)
    with pytest.raises(expected, match=said):
        broadcast_object_list([given], from_process=1)
    if rank:
        with pytest.raises(TypeError, match=said):
            gather_at_first(given)
    else:
        with pytest.raises(CollectiveError, match=f"on rank 1: TypeError: {said}"):
            gather_at_first(given)
    assert all_gather_object(rank) == [0, 1]
