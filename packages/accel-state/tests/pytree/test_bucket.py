"""Tensors survive the way through one buffer of bytes, whatever their dtypes and shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import CollectiveError
from accel_state.pytree.bucket import (
    as_bytes,
    by_dtype,
    gathered_shape,
    in_batches,
    join,
    pack,
    split,
    unpack,
    unpack_rows,
)

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.complex128]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.tuples(st.sampled_from(DTYPES), shapes).map(lambda one: torch.randint(0, 2, one[1]).to(one[0]))
some = st.lists(tensors, min_size=1, max_size=8)


@given(some)
def test_unpack_undoes_pack(leaves):
    for found, leaf in zip(unpack(pack(leaves)), leaves, strict=True):
        assert found.dtype == leaf.dtype
        assert torch.equal(found, leaf)


@given(some, st.integers(2, 4))
def test_rows_of_ranks_come_out_joined(leaves, world_size):
    peers = [[leaf.logical_not().to(leaf.dtype) if rank % 2 else leaf for leaf in leaves] for rank in range(world_size)]
    rows = torch.stack([pack(one).buffer for one in peers])
    for found, *theirs in zip(unpack_rows(rows, pack(leaves)), *peers, strict=True):
        expected = torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in theirs])
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@given(some)
def test_every_piece_is_aligned_to_its_elements(leaves):
    packed, start = pack(leaves), 0
    for piece in packed.pieces:
        assert start % piece.dtype.itemsize == 0
        start += piece.nbytes
    assert packed.buffer.numel() % packed.pieces[0].dtype.itemsize == 0
    assert packed.buffer.numel() - start < packed.pieces[0].dtype.itemsize


@given(some)
def test_each_leaf_is_in_one_group(leaves):
    grouped = [
        (dtype, shape, index)
        for dtype, by_shape in by_dtype(leaves).items()
        for shape, indices in by_shape.items()
        for index in indices
    ]
    assert sorted(index for _, _, index in grouped) == list(range(len(leaves)))
    assert all(leaves[index].dtype == dtype and leaves[index].shape == shape for dtype, shape, index in grouped)
    widths = [dtype.itemsize for dtype in by_dtype(leaves)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_parts_are_no_views_for_autograd(count):
    weight = torch.ones(100, requires_grad=True)
    with torch.no_grad():
        parts = split(torch.zeros(100 * count), [torch.empty(100)] * count)
    parts[0].copy_(weight)
    parts[0].sum().backward()
    assert weight.grad.eq(1).all()
    assert parts[-1].untyped_storage().nbytes() <= 1 << 16


def test_devices_and_large_leaves_travel_apart_and_all_start_before_any_is_awaited():
    large = torch.zeros(1 << 18)
    leaves = [torch.ones(1), large, torch.ones(2, device="meta"), torch.ones(3), large[:-1]]
    asked = []

    def twice(some):
        asked.append([leaf.shape[0] for leaf in some])

        def finish():
            asked.append("waited")
            return [leaf * 2 for leaf in some]

        return finish

    found = in_batches(leaves, twice)
    assert asked == [[1, 3, (1 << 18) - 1], [2], [1 << 18], *["waited"] * 3]
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in leaves]
    assert in_batches([], twice) == []


def test_a_single_contiguous_tensor_is_not_copied():
    leaf = torch.ones(3, 2)
    assert join([leaf]).data_ptr() == leaf.data_ptr()
    assert as_bytes(join([leaf])).data_ptr() == leaf.data_ptr()


@pytest.mark.parametrize(("shape", "expected"), [((), (3,)), ((2,), (6,)), ((0, 4), (0, 4)), ((2, 5), (6, 5))])
def test_the_shape_of_all_ranks(shape, expected):
    assert gathered_shape(torch.Size(shape), 3) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    ],
    ids=["sparse", "nested"],
)
def test_tensors_that_are_not_dense_are_named(make, kind):
    leaf = make()
    with pytest.raises(CollectiveError, match=f"{kind} tensors"):
        join([leaf, leaf])
