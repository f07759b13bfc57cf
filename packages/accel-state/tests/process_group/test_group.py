import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from accel_state.process_group.group import sibling_group


def summed(group: dist.ProcessGroup) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


@pytest.mark.ranks(3)
def test_ranks_that_made_other_groups_before_meet_in_a_sibling(rank: int) -> None:
    pair = dist.new_group([0, 2])
    own = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    assert summed(sibling_group(dist.group.WORLD)) == 3
    if rank != 1:
        sibling = sibling_group(pair, backend="gloo")
        assert (summed(sibling), dist.get_process_group_ranks(sibling)) == (2, [0, 2])
    dist.barrier()
    assert len(own) == rank


@pytest.mark.ranks(3)
def test_a_sibling_of_some_ranks_leaves_later_groups_of_torch_as_they_are(rank: int) -> None:
    part = sibling_group(dist.group.WORLD, ranks=(0, 2))
    if rank == 1:
        assert part is dist.GroupMember.NON_GROUP_MEMBER
    else:
        assert (summed(part), dist.get_process_group_ranks(part), part.rank()) == (2, [0, 2], rank // 2)
    # torch 2.15 names it by the number of groups before it, those that only some ranks made among them.
    assert summed(dist.new_group()) == 3


@pytest.mark.ranks(2)
def test_a_sibling_is_made_again_after_it_was_destroyed() -> None:
    for _ in range(3):
        group = sibling_group(dist.group.WORLD)
        assert summed(group) == 2
        dist.barrier()
        dist.destroy_process_group(group)
        gone = weakref.ref(group)
        del group
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(("backend", "minutes"), [("nccl", 10), ("cpu:gloo,cuda:nccl", 10), ("gloo", None)])
def test_nccl_has_its_own_timeout_also_beside_gloo(backend: str, minutes: int | None) -> None:
    from datetime import timedelta

    from accel_state.process_group.group import _own_timeout

    assert _own_timeout(backend) == (None if minutes is None else timedelta(minutes=minutes))
