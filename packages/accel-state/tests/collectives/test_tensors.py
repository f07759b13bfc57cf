"""Nested tensors of all ranks, joined, copied and reduced: what a loop over leaves and ranks would give."""

import collections
import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from accel_state import CollectiveError, Session
from accel_state.collectives.tensors import (
    all_gather_object,
    broadcast,
    copy_tensor_to_devices,
    from_order,
    gather,
    in_order,
    pad_across_processes,
    reduce,
    wire_dtype,
)
from accel_state.pytree.operations import leaves_of

Pair = collections.namedtuple("Pair", ["x", "y"])
EXACT = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
INEXACT = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
DTYPES = [*EXACT, *INEXACT, torch.float8_e4m3fn]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: list


def make(dtype, shape, rank):
    """Small integers, which every dtype holds exactly, and their sums too."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * len(shape) + DTYPES.index(dtype))
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def tree(rank, dtypes=DTYPES):
    """Every dtype, in containers of all kinds: without dimensions, empty, strided, conjugated, with gradient."""
    found = {
        str(dtype): [make(dtype, (3, 2), rank), Pair(make(dtype, (), rank), make(dtype, (0, 4), rank))]
        for dtype in dtypes
    }
    found["batch"] = Batch(make(torch.float32, (4, 3), rank).t(), [make(torch.float32, (2,), rank).requires_grad_()])
    found["alike"] = {index: make(torch.float32, (2, 2), rank) + index for index in range(5)}
    if torch.complex64 in dtypes:
        found["views"] = (make(torch.complex64, (2,), rank).conj(), make(torch.complex64, (2,), rank).conj().imag)
    return found


def plain(leaf):
    return leaf.detach().resolve_conj().resolve_neg()


def equal(a, b):
    """Bit for bit (float8 has no equality)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (plain(one).contiguous().view(-1).view(torch.uint8) for one in (a, b))
    return torch.equal(a, b)


def joined(leaves):
    return torch.cat([plain(leaf).reshape(1) if leaf.ndim == 0 else plain(leaf) for leaf in leaves])


def counted(monkeypatch):
    """Names of the collectives that torch is asked for from now on."""
    calls = []
    gathers = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_gather")
    for name in (*gathers, "all_reduce", "broadcast"):
        if hasattr(dist, name):
            original = getattr(dist, name)

            def count(*args, _name=name, _original=original, **kwargs):
                calls.append(_name)
                return _original(*args, **kwargs)

            monkeypatch.setattr(dist, name, count)
    return calls


def check_gather(rank, world_size):
    found = leaves_of(gather(tree(rank)))
    peers = [leaves_of(tree(peer)) for peer in range(world_size)]
    for leaf, *theirs in zip(found, *peers, strict=True):
        assert equal(leaf, joined(theirs))
        assert not leaf.requires_grad
        assert leaf.is_contiguous()


@pytest.mark.ranks(2)
def test_gather_joins_every_leaf_of_every_dtype(rank, world_size):
    check_gather(rank, world_size)


@pytest.mark.ranks(4)
def test_gather_joins_every_leaf_of_four_ranks(rank, world_size):
    check_gather(rank, world_size)


@pytest.mark.ranks(2)
def test_one_leaf_is_gathered_as_many_are(rank, world_size):
    mine, peers = leaves_of(tree(rank)), [leaves_of(tree(peer)) for peer in range(world_size)]
    for leaf, *theirs in zip(mine, *peers, strict=True):
        assert equal(gather(leaf), joined(theirs))


@pytest.mark.ranks(2)
def test_containers_come_back(rank):
    found = gather({"b": Batch(torch.ones(1), [torch.ones(2)]), "a": (Pair(torch.ones(1), torch.ones(1)),)})
    assert list(found) == ["b", "a"]
    assert type(found["b"]) is Batch
    assert type(found["a"][0]) is Pair
    assert gather({"a": [], "b": ()}) == {"a": [], "b": ()}


@pytest.mark.ranks(2)
def test_dicts_filled_in_another_order_are_matched_by_key(rank):
    mine = {"loss": torch.tensor([1.0]), "accuracy": torch.tensor([2.0])}
    found = gather(mine if rank == 0 else dict(reversed(mine.items())))
    assert found["loss"].tolist() == [1.0, 1.0]
    assert found["accuracy"].tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("size", [0, 1, 70000])
def test_gathered_leaves_may_be_changed_in_place_under_a_gradient(rank, count, size):
    weight = torch.ones(size, requires_grad=True)
    for leaf in gather([torch.zeros(size) for _ in range(count)]):
        leaf[:size] = weight
        leaf.sum().backward()
    assert weight.grad.eq(count).all()


@pytest.mark.ranks(2)
def test_a_small_leaf_does_not_keep_a_large_neighbour_alive(rank):
    for done in (gather, reduce):
        found = done({"logits": torch.zeros(1 << 16), "loss": torch.tensor(1.0), "more": torch.tensor(1.0)})
        assert found["loss"].untyped_storage().nbytes() <= 1 << 10


@pytest.mark.ranks(2)
def test_as_few_collectives_as_the_dtypes_allow(rank, world_size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = counted(monkeypatch)
        gather(tree(rank))
        broadcast(tree(rank))
        assert len(calls) == 2
        calls.clear()
        reduce([make(dtype, (3,), rank) for dtype in (torch.float32, torch.int64, torch.float32, torch.int64)])
        assert len(calls) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strided", [False, True])
def test_large_leaves_go_beside_the_others(rank, strided):
    large = torch.full((1 << 9, 1 << 9), float(rank))
    tree = {"large": large.t() if strided else large, "small": torch.tensor([rank]), "tiny": torch.tensor(rank)}
    found = gather(tree)
    assert found["large"].shape == (1 << 10, 1 << 9)
    assert found["large"].mean(1).tolist() == [0.0] * (1 << 9) + [1.0] * (1 << 9)
    assert found["small"].tolist() == found["tiny"].tolist() == [0, 1]
    assert reduce(tree, "sum")["large"].eq(1).all()
    broadcast(tree, 1)
    assert large.eq(1).all()
    assert tree["tiny"].item() == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_overwrites_in_place(rank, source):
    mine, theirs = tree(rank), leaves_of(tree(source))
    before = leaves_of(mine)
    assert broadcast(mine, source) is mine
    for leaf, old, expected in zip(leaves_of(mine), before, theirs, strict=True):
        assert leaf is old
        assert equal(leaf, expected)


@pytest.mark.ranks(2)
def test_one_leaf_is_broadcast_as_many_are(rank):
    for leaf, expected in zip(leaves_of(tree(rank)), leaves_of(tree(1)), strict=True):
        assert equal(broadcast(leaf, 1), expected)


EXPECTED = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.sum(0) / len(stack),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def check_reduce(rank, world_size, reduction, scale):
    dtypes = [dtype for dtype in DTYPES if not (dtype.is_complex and reduction in ("max", "min"))]
    mine = tree(rank, dtypes)
    found = leaves_of(reduce(mine, reduction, scale))
    peers = [leaves_of(tree(peer, dtypes)) for peer in range(world_size)]
    for leaf, before, *theirs in zip(found, leaves_of(mine), *peers, strict=True):
        wide = torch.complex128 if before.is_complex() else torch.float64
        expected = EXPECTED[reduction](torch.stack([plain(one).to(wide) for one in theirs])) * scale
        torch.testing.assert_close(leaf.to(wide), expected, rtol=0.07 if before.dtype.itemsize == 1 else 1e-2, atol=0.0)
        exact = before.dtype in EXACT
        if exact and (reduction == "mean" or scale != 1.0):
            assert leaf.dtype == torch.float32
        elif before.dtype == torch.bool and reduction == "sum":
            assert leaf.dtype == torch.int64
        else:
            assert leaf.dtype == before.dtype
    assert all(equal(one, other) for one, other in zip(leaves_of(mine), leaves_of(tree(rank, dtypes)), strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", sorted(EXPECTED))
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_reduce_is_the_reduction_of_the_stacked_leaves(rank, world_size, reduction, scale):
    check_reduce(rank, world_size, reduction, scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.is_floating_point], ids=str)
def test_a_nan_of_one_rank_is_the_extreme_on_every_rank(rank, dtype, reduction):
    number, nan = torch.tensor(1.5 + rank), torch.tensor(math.nan)
    mine = [nan if rank == 0 else number, number if rank == 0 else nan, -nan if rank == 0 else -number, number]
    found = reduce([one.to(dtype) for one in mine], reduction)
    assert [one.dtype for one in found] == [dtype] * 4
    assert torch.stack([one.float() for one in found]).isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("nan_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_integers_have_the_order_of_the_numbers_they_stand_for(dtype, nan_last):
    ends, sizes = torch.finfo(dtype), torch.tensor([0.0, 0.5, 1.0, 1e4, math.inf], dtype=dtype)
    small = torch.tensor([ends.tiny, ends.smallest_normal, ends.max], dtype=dtype)
    numbers = torch.cat([sizes, small, -sizes[1:], -small]).sort().values
    integers = in_order(numbers, nan_last=nan_last)
    assert torch.equal(integers, integers.sort().values)
    assert equal(from_order(integers), numbers.to(torch.promote_types(dtype, torch.float32)))
    nans = in_order(torch.tensor([math.nan, -math.nan], dtype=dtype), nan_last=nan_last)
    assert bool((nans > integers.max() if nan_last else nans < integers.min()).all())
    assert bool(from_order(nans).isnan().all())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduce_over_four_ranks(rank, world_size, reduction):
    check_reduce(rank, world_size, reduction, 1.0)


@pytest.mark.ranks(2)
def test_the_mean_of_halves_is_finite_where_their_sum_is_not(rank):
    mine = torch.tensor([40000.0 + 64 * rank, 1e-7], dtype=torch.float16)
    mean = reduce({"one": mine, "many": [mine, mine[:1]]}, scale=0.5)
    assert mean["one"].dtype == torch.float16
    for leaf in (mean["one"], mean["many"][0]):
        assert torch.equal(leaf, torch.tensor([20016.0, 5e-8], dtype=torch.float16))


@pytest.mark.ranks(2)
def test_the_pinned_numbers(rank, world_size):
    mine = torch.arange(1.0, 1 + world_size) + world_size * rank
    assert gather(mine).tolist() == [1, 2, 3, 4]
    assert reduce(mine, "sum").tolist() == [4, 6]
    assert reduce(mine).tolist() == [2, 3]
    assert reduce(mine, "max").tolist() == [3, 4]
    assert broadcast(mine).tolist() == [1, 2]
    tensor = torch.tensor([1, 2, 3], dtype=torch.int32) if rank == 0 else None
    assert copy_tensor_to_devices(tensor).tolist() == [1, 2, 3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("value", [torch.zeros(0, 3), torch.tensor(True), torch.ones(1, 0, 2).bfloat16()])
def test_a_tensor_known_to_one_rank_reaches_all(rank, source, value):
    found = copy_tensor_to_devices(value if rank == source else None)
    assert equal(found, value)
    assert found is not value


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("givers", "text"), [([], "none did"), ([0, 1], r"\[0, 1\] did")])
def test_exactly_one_rank_knows_the_tensor(rank, givers, text):
    with pytest.raises(CollectiveError, match=text):
        copy_tensor_to_devices(torch.ones(1) if rank in givers else None)


@pytest.mark.ranks(4)
def test_a_subgroup_talks_among_itself(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    assert gather([torch.tensor(rank), torch.tensor([rank])], group=mine)[0].tolist() == [rank % 2, rank % 2 + 2]
    assert reduce(torch.tensor(rank), "sum", group=mine).item() == 2 * (rank % 2) + 2
    assert broadcast(torch.tensor([rank]), 1, group=mine).tolist() == [rank % 2 + 2]
    assert all_gather_object(rank, group=mine) == [rank % 2, rank % 2 + 2]
    with pytest.raises(CollectiveError, match="not a member"):
        gather(torch.ones(1), group=other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("call", "name"), [(gather, "gather"), (broadcast, "broadcast"), (reduce, "reduce")])
def test_what_is_no_tensor_is_refused_before_anything_is_sent(rank, call, name):
    with pytest.raises(TypeError, match=rf"Unsupported types \(<class 'int'>\) passed to `{name}`"):
        call({"a": torch.ones(1), "b": 3})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [gather, broadcast, reduce, pad_across_processes])
def test_tensors_that_ranks_hold_in_parts_are_refused_with_the_way_out(rank, call):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    whole = torch.arange(8.0).view(4, 2)
    shards = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(CollectiveError, match=rf"`{call.__name__}` .* DTensor on 2 ranks, .*`full_tensor\(\)`"):
        call({"a": torch.ones(1), "b": shards})
    assert call({"b": shards.full_tensor()})["b"].shape[1] == 2


@pytest.mark.ranks(1)
def test_a_tensor_of_a_mesh_of_one_rank_is_taken(rank):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    alone = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])
    assert reduce(alone, "sum").full_tensor().tolist() == [1.0] * 3


@pytest.mark.ranks(2)
def test_sparse_tensors_are_refused_with_the_way_out(rank):
    with pytest.raises(CollectiveError, match=r"sparse_coo.*to_dense"):
        gather([torch.eye(2).to_sparse(), torch.eye(2)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [-1, 2])
def test_a_source_outside_the_group_is_named(rank, source):
    with pytest.raises(ValueError, match=f"from_process={source} .* 0 to 1"):
        broadcast(torch.ones(1), source)


def test_alone_everything_is_as_it_was():
    data = {"a": torch.ones(2), "b": torch.tensor(3)}
    assert gather(data) is data
    assert broadcast(data) is data
    assert copy_tensor_to_devices(data["a"]) is data["a"]
    found = reduce(data, "sum", 2.0)
    assert found["a"].tolist() == [2.0, 2.0]
    assert found["b"].item() == 6.0
    assert data["a"].tolist() == [1.0, 1.0]
    assert reduce(data)["a"] is not data["a"]


def test_a_group_of_one_is_nobody(tmp_path):
    with Session.open(cpu=True):
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            data = {"a": torch.tensor(1.0)}
            assert gather(data) is data
            assert reduce(data)["a"].item() == 1.0
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(("given", "near"), [("avg", None), ("summ", "sum"), ("Mean", "mean"), (None, None)])
def test_an_unknown_reduction_names_the_known_ones(given, near):
    with pytest.raises(ValueError, match=r"mean, sum, max, min" + (f"; did you mean '{near}'" if near else "$")):
        reduce(torch.ones(1), given)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_complex_numbers_have_no_order(reduction):
    with pytest.raises(ValueError, match=f"no {reduction}"):
        reduce(torch.ones(1, dtype=torch.complex64), reduction)


@pytest.mark.parametrize("reduction", sorted(EXPECTED))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_wire_is_never_narrower_than_the_leaf(dtype, reduction):
    assert wire_dtype(dtype, reduction).itemsize >= dtype.itemsize
