"""A fake group answers as if every rank had this rank's tensors, and counts what it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import Session
from accel_state.collectives.objects import agree, all_gather_object, broadcast_object_list
from accel_state.errors import SessionError
from accel_state.process_group.fake_group import FakeTraffic, open_fake_group
from accel_state.process_group.group import sibling_group


@contextmanager
def fake(world_size: int, rank: int = 0) -> Iterator[FakeTraffic]:
    traffic = open_fake_group(rank, world_size)
    try:
        yield traffic
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(1, group=False)
def test_collectives_have_the_results_of_equal_ranks() -> None:
    with fake(4) as traffic:
        own = torch.arange(4.0)
        total, mean = own.clone(), own.clone()
        dist.all_reduce(total)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert total.tolist() == [0, 4, 8, 12]
        assert mean.tolist() == own.tolist()
        gathered, shard = torch.empty(16), torch.empty(1)
        dist.all_gather_into_tensor(gathered, own)
        dist.reduce_scatter_tensor(shard, own + 1)
        assert gathered.tolist() == own.tolist() * 4
        assert shard.tolist() == [4]
        every = [torch.empty(4) for _ in range(4)]
        dist.all_gather(every, own)
        assert all(one.equal(own) for one in every)
        received = torch.empty(6)
        dist.all_to_all_single(received, own + 1, [2, 2, 1, 1], [1, 1, 1, 1])
        assert received.tolist() == [1] * 6
        dist.recv(received, 2)
        assert not received.any()
        counted = {one.kind: (one.calls, one.bytes, one.ranks) for one in traffic.take()}
        everybody = (0, 1, 2, 3)
        assert counted == {
            "all_reduce": (2, 32, everybody),
            "all_gather": (2, 32, everybody),
            "reduce_scatter": (1, 16, everybody),
            "all_to_all": (1, 16, everybody),
            "recv": (1, 24, everybody),
        }
        assert traffic.take() == ()


@pytest.mark.ranks(1, group=False)
def test_an_all_to_all_receives_from_each_rank_what_this_rank_sends_to_itself() -> None:
    with fake(4, 2):
        own = torch.tensor([[10, 11], [20, 21], [30, 31], [40, 41]])
        even, uneven = torch.empty_like(own), torch.empty(5, 2, dtype=own.dtype)
        dist.all_to_all_single(even, own)
        assert even.tolist() == [[30, 31]] * 4
        dist.all_to_all_single(uneven, own, [2, 3, 0, 0], [1, 1, 2, 0])
        assert uneven.tolist() == [[30, 31], [40, 41], [30, 31], [40, 41], [30, 31]]
        listed = [torch.empty(2, dtype=own.dtype) for _ in range(4)]
        group: Any = dist.group.WORLD
        group.alltoall(listed, list(own)).wait()
        assert [one.tolist() for one in listed] == [[30, 31]] * 4


@pytest.mark.ranks(1, group=False)
def test_a_sum_of_truth_values_is_true_where_one_is() -> None:
    with fake(4):
        flags = torch.tensor([True, False])
        dist.all_reduce(flags)
        assert flags.tolist() == [True, False]


@pytest.mark.ranks(1, group=False)
@pytest.mark.parametrize("place", [0, 3])
def test_a_session_adopts_it_and_objects_are_those_of_this_rank(place: int) -> None:
    with fake(8, place), Session.open(cpu=True) as session:
        assert (session.rank, session.world_size, session.owns_group) == (place, 8, False)
        assert all_gather_object("own") == ["own"] * 8
        assert broadcast_object_list([place], 5) == [place]
        assert agree(None, note=place) == [place] * 8
        session.wait_for_everyone()


@pytest.mark.ranks(1, group=False)
def test_groups_made_later_are_fake_and_know_their_ranks() -> None:
    with fake(4) as traffic:
        half = dist.new_group([0, 2])
        dist.all_reduce(torch.ones(2), group=half)
        whole = sibling_group(dist.group.WORLD, backend="gloo")
        dist.broadcast(torch.ones(2), 0, group=whole)
        ranks = {one.kind: one.ranks for one in traffic.take()}
        assert ranks["all_reduce"] == (0, 2)
        assert ranks["broadcast"] == (0, 1, 2, 3)


@pytest.mark.ranks(1, group=False)
def test_a_second_group_and_a_rank_outside_are_refused() -> None:
    with pytest.raises(SessionError, match="rank=4 is not below world_size=4; expected 0 to 3"):
        open_fake_group(4, 4)
    with fake(2), pytest.raises(SessionError, match="open already"):
        open_fake_group(0, 2)
