"""Maps of what each rank has of a parameter: parts and wholes are each other's inverse, and bad maps are told."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_deepspeed.tensor_parallel.partition_map import PartMap


def described(rows: int, columns: int, widths: list[int], *, by_rows: bool, copies: int = 1) -> dict[str, Any]:
    """How DeepSpeed tells of a weight that is ``copies`` in one, each cut into the same widths."""
    lines = rows if by_rows else columns
    shape = [rows * copies, columns] if by_rows else [rows, columns * copies]
    ranks: dict[int, Any] = {}
    start = 0
    for rank, width in enumerate(widths):
        part = [width * copies, columns] if by_rows else [rows, width * copies]
        block = [width, columns] if by_rows else [rows, width]
        pieces = []
        for copy in range(copies):
            first, inside = lines * copy + start, width * copy
            pieces.append(
                {
                    "shape": block,
                    "source": [first * (columns if by_rows else 1), [shape[1], 1]],
                    "dest": [inside * (columns if by_rows else 1), [part[1], 1]],
                    "locations": [rank],
                }
            )
        ranks[rank] = {"shard_shape": part, "pieces": pieces}
        start += width
    return {"logical_shape": shape, "ranks": ranks}


@given(
    other=st.integers(1, 5),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    by_rows=st.booleans(),
    copies=st.integers(1, 3),
    begins=st.integers(0, 3),
)
def test_a_full_tensor_is_its_parts(other: int, widths: list[int], by_rows: bool, copies: int, begins: int) -> None:
    rows, columns = (sum(widths), other) if by_rows else (other, sum(widths))
    found = PartMap.of(described(rows, columns, widths, by_rows=by_rows, copies=copies))
    # A view into a larger storage, as parts of flat buffers are.
    whole = torch.arange(found.shape.numel() + begins)[begins:].view(found.shape)
    parts = [found.take(whole, rank).view(shape) for rank, shape in enumerate(found.shapes)]
    dim = 0 if by_rows else 1
    cut = [copy.split(widths, dim) for copy in whole.chunk(copies, dim)]
    expected = [torch.cat([copy[rank] for copy in cut], dim) for rank in range(len(widths))]
    assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
    assert torch.equal(found.join(parts), whole)
    assert found.cut == (len(widths) > 1)


def test_ranks_are_read_in_their_order_and_may_be_words() -> None:
    told = described(4, 2, [1, 3], by_rows=True)
    told["ranks"] = {str(rank): told["ranks"][rank] for rank in (1, 0)}
    assert PartMap.of(told).shapes == (torch.Size([1, 2]), torch.Size([3, 2]))


def test_what_every_rank_has_is_not_cut() -> None:
    told = described(2, 2, [2], by_rows=True)
    told["ranks"][1] = told["ranks"][0]
    found = PartMap.of(told)
    assert not found.cut
    assert torch.equal(found.join([torch.ones(2, 2)] * 2), torch.ones(2, 2))


def test_maps_that_leave_something_out_or_reach_outside_are_refused() -> None:
    told = described(4, 2, [2, 2], by_rows=True)
    parts = [torch.ones(2, 2)] * 2
    with pytest.raises(ValueError, match=r"parts of \[\(2, 2\)\], and \[\(2, 2\), \(2, 2\)\]"):
        PartMap.of(told).join(parts[:1])
    told["ranks"][1]["pieces"][0]["scale"] = 0.5
    with pytest.raises(ValueError, match="scaled"):
        PartMap.of(told)
    del told["ranks"][1]["pieces"][0]["scale"]
    told["ranks"][1]["pieces"][0]["source"][0] = 0
    with pytest.raises(ValueError, match="4 of its 8 elements are no rank's"):
        PartMap.of(told).join(parts)
    told["ranks"][1]["pieces"][0]["source"][0] = 6
    with pytest.raises(ValueError, match="outside"):
        PartMap.of(told).join(parts)
