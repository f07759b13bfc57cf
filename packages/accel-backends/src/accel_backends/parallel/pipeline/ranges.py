"""Division of the blocks of a model among pipeline stages, and of the stages among ranks."""

from collections.abc import Sequence
from itertools import accumulate

from accel_state.errors import PrepareError


def balanced_ranges(costs: Sequence[int], num_stages: int) -> list[range]:
    """Consecutive blocks of each stage, at least one, so that the squares of the costs of the stages add up to least.

    Of equally good divisions, the one whose last stages have fewer blocks, because the head computes longest.

    Raises:
        PrepareError: fewer blocks than stages.
    """
    count = len(costs)
    if count < num_stages:
        raise PrepareError(f"{count} blocks do not make {num_stages} pipeline stages; nearest: {count} stages")
    sums = [0, *accumulate(costs)]
    # For each number of stages, by the number of blocks in them: the least sum, and the first block of the last stage.
    best = [[(total**2, 0) for total in sums]]
    for stage in range(1, num_stages):
        row = [(0, 0)] * (count + 1)
        for stop in range(stage + 1, count + 1):
            row[stop] = min(
                ((best[-1][start][0] + (sums[stop] - sums[start]) ** 2, start) for start in range(stage, stop)),
                key=lambda found: (found[0], -found[1]),
            )
        best.append(row)
    ranges, stop = list[range](), count
    for row in reversed(best):
        start = row[stop][1]
        ranges.append(range(start, stop))
        stop = start
    return ranges[::-1]


def given_ranges(split: Sequence[int], num_blocks: int, num_stages: int) -> list[range]:
    """Blocks of each stage, from the number of blocks of each.

    Raises:
        PrepareError: the numbers are not those of so many stages, or do not add up to the blocks of the model.
    """
    if len(split) != num_stages or sum(split) != num_blocks or min(split) < 1:
        raise PrepareError(
            f"split={list(split)} for {num_blocks} blocks in {num_stages} pipeline stages; expected {num_stages} "
            f"numbers of at least 1 with the sum {num_blocks}"
        )
    stops = list(accumulate(split))
    return [range(stop - size, stop) for size, stop in zip(split, stops, strict=True)]


def stages_of_rank(rank: int, num_ranks: int, per_rank: int, *, v_shaped: bool) -> list[int]:
    """Stages of a rank: every ``num_ranks``-th one, or two that lie on a V, so that the last rank has neighbours."""
    if v_shaped:
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, num_ranks * per_rank, num_ranks))
