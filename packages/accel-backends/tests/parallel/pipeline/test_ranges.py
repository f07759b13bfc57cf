"""Blocks are divided so that the stages are about equally large."""

import pytest

from accel_backends.parallel.pipeline.ranges import balanced_ranges, given_ranges, stages_of_rank
from accel_state.errors import PrepareError


def sizes(ranges):
    assert [position for one in ranges for position in one] == list(range(ranges[-1].stop))
    return [len(one) for one in ranges]


def test_equal_blocks_are_divided_evenly():
    assert sizes(balanced_ranges([1] * 8, 4)) == [2, 2, 2, 2]
    assert sizes(balanced_ranges([1] * 7, 3)) == [3, 2, 2]


def test_large_embeddings_count():
    assert sizes(balanced_ranges([9, 1, 1, 1, 1, 1, 1, 4], 3)) == [1, 5, 2]


def test_every_stage_has_a_block():
    assert sizes(balanced_ranges([100, 1, 1], 3)) == [1, 1, 1]
    with pytest.raises(PrepareError, match=r"2 blocks do not make 3 pipeline stages; nearest: 2 stages"):
        balanced_ranges([1, 1], 3)


def test_a_given_split_has_to_fit():
    assert sizes(given_ranges([1, 3], 4, 2)) == [1, 3]
    for split in ([4], [1, 2], [0, 4]):
        with pytest.raises(PrepareError, match=r"for 4 blocks in 2 pipeline stages; expected 2 numbers of at least 1"):
            given_ranges(split, 4, 2)


def test_stages_of_a_rank_lie_on_a_loop_or_on_a_v():
    assert [stages_of_rank(rank, 2, 2, v_shaped=False) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stages_of_rank(rank, 2, 2, v_shaped=True) for rank in range(2)] == [[0, 3], [1, 2]]
