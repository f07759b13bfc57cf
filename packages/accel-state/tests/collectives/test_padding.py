"""Tensors become as long as the longest of all ranks, or as a division needs them."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.collectives.padding import pad_to
from accel_state.collectives.tensors import (
    CannotPadNestedTensorWarning,
    gather,
    pad_across_processes,
    pad_input_tensors,
)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: list


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pad_first", [False, True])
@pytest.mark.parametrize("dim", [0, -2])
def test_every_leaf_becomes_as_long_as_the_longest(rank, pad_first, dim):
    mine = Batch(torch.full((rank + 1, 2), 7), [torch.full((3 - rank, 1), 7.0), torch.tensor(1.0)])
    found = pad_across_processes(mine, dim=dim, pad_index=-100, pad_first=pad_first)
    assert type(found) is Batch
    assert found.x.shape == (2, 2)
    assert found.y[0].shape == (3, 1)
    assert found.y[1] is mine.y[1]
    assert found.x.dtype == torch.int64
    column = found.x[:, 0].tolist()
    padded = [-100, 7] if pad_first else [7, -100]
    assert column == (padded if rank == 0 else [7, 7])
    assert gather(found).x.shape == (4, 2)


@pytest.mark.ranks(2)
def test_the_pinned_example(rank, world_size):
    mine = torch.arange(world_size + (rank == 0))
    found = pad_across_processes(mine)
    assert found.tolist() == ([0, 1, 2] if rank == 0 else [0, 1, 0])
    if rank == 0:
        assert found is mine


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [3, -4])
def test_a_dimension_that_is_not_there_pads_nothing(rank, dim):
    mine = torch.ones(1, rank + 1, 2)
    assert pad_across_processes(mine, dim=dim) is mine


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-100, torch.uint8), (-100, torch.bool), (0.5, torch.int64), (float("nan"), torch.int32), (300, torch.int8)],
)
@pytest.mark.sampled(2)
def test_a_value_that_the_dtype_lacks_is_refused_on_every_rank(rank, value, dtype):
    rows = torch.ones(1 + rank).to(dtype)
    with pytest.raises(ValueError, match=f"pad_index={value} is no value of {str(dtype)[6:]}"):
        pad_across_processes(rows, pad_index=value)
    assert pad_across_processes({"ids": torch.ones(1 + rank), "mask": rows[:1]}, pad_index=value)["mask"] is not None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [None, torch.tensor(7), "0"])
def test_padding_with_anything_but_a_number_is_refused_on_every_rank(rank, value):
    with pytest.raises(TypeError, match=r"pad_index is .*; expected a number"):
        pad_across_processes(torch.ones(1 + rank), pad_index=value)


@pytest.mark.ranks(2)
def test_an_empty_rank_is_padded_too(rank):
    found = pad_across_processes({"a": torch.ones(2 * rank, 3, dtype=torch.bool)})
    assert found["a"].shape == (2, 3)
    assert found["a"].any() == (rank == 1)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_with_a_warning(rank):
    mine = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning):
        assert pad_across_processes(mine) is mine


@pytest.mark.parametrize("given", ["x", [torch.ones(1), None]])
def test_what_is_no_tensor_is_refused_alone_as_with_others(given):
    with pytest.raises(TypeError, match="passed to `pad_across_processes`"):
        pad_across_processes(given)


@given(st.integers(0, 4), st.integers(0, 6), st.booleans())
def test_padding_only_ever_adds_the_value(length, wanted, first):
    leaf = torch.arange(1, length + 1)
    found = pad_to(leaf, wanted, first=first)
    assert len(found) == max(length, wanted)
    assert found[found != 0].tolist() == leaf.tolist()
    assert (found is leaf) == (wanted <= length)


@pytest.mark.parametrize(
    ("rows", "processes", "expected"),
    [(1, 2, 2), (3, 2, 4), (4, 3, 6), (3, 4, 4), (4, 6, 6), (1, 6, 6), (2, 6, 6), (61, 6, 66), (6, 3, 6)],
)
def test_a_batch_is_padded_until_it_divides(rows, processes, expected):
    data = {"x": torch.ones(rows, 2), "table": torch.ones(rows + 1), "scale": torch.tensor(1.0)}
    found = pad_input_tensors(data, rows, processes)
    assert found["x"].shape == (expected, 2)
    assert found["x"].sum() == 2 * rows
    assert found["table"] is data["table"]
    assert found["scale"] is data["scale"]


def test_a_batch_along_another_dimension():
    assert pad_input_tensors(torch.ones(2, 3), 3, 2, dim=1).shape == (2, 4)


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_cannot_share_a_batch(processes):
    with pytest.raises(ValueError, match=f"num_processes={processes}"):
        pad_input_tensors(torch.ones(2), 2, processes)
