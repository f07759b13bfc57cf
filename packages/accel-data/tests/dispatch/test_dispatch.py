"""Dealing out and packing batches: every row once, in any container."""

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.scatter import ABSENT, Dealer, join_rows, repeat_rows, slice_rows
from accel_data.dispatch.serialization import Arriving, body_size, joined_body, pack, split_body
from accel_state.errors import DataError

Pair = namedtuple("Pair", "x y")


@dataclass
class Example:
    x: torch.Tensor
    names: list


def roundtrip(content):
    packed = pack(content, Blocks())
    front, *rest = split_body(packed.body)
    body = bytearray(body_size(front))
    for room, sent in zip(joined_body(front, body), rest, strict=True):
        room.copy_(sent)
    arriving = Arriving(body, Blocks())
    for room, sent in zip(arriving.room, packed.large, strict=True):
        room.copy_(sent)
    return arriving.content()


def batch_of(ids):
    """Rows of a nested batch that all tell which sample they are."""
    return {
        "x": torch.tensor(ids),
        "deep": [torch.tensor(ids)[:, None].float(), {"name": [str(i) for i in ids]}],
        "k": 3,
    }


def ids_of(batch):
    ids = batch["x"].tolist()
    assert batch["deep"][0].flatten().tolist() == ids
    assert batch["deep"][1]["name"] == [str(i) for i in ids]
    assert batch["k"] == 3
    return ids


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_row_is_dealt_once_after_removing_what_is_repeated(n, per, shards, split, even):
    size = per * shards if split else per
    dealer = Dealer(shards=shards, split=split, even=even, batch_rows=size)
    batches = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
    seen = []
    for start in range(0, len(batches), dealer.takes):
        group = batches[start : start + dealer.takes]
        dealt = dealer.deal([batch_of(ids) for ids in group], [len(ids) for ids in group])
        counts = dealt.counts or [None] * shards
        assert len(dealt.parts) == shards
        assert dealt.rows == sum(map(len, group))
        if even:
            assert len({len(ids_of(part)) for part in dealt.parts}) == 1
        for part, count in zip(dealt.parts, counts, strict=True):
            assert (part is ABSENT) is (count == -1)
            seen += [] if part is ABSENT else ids_of(part)[:count]
    assert seen == list(range(n))


def test_dropping_the_last_step_is_for_incomplete_ones_only():
    dealer = Dealer(shards=2, drop_last=True, batch_rows=2)
    full = [batch_of([0, 1]), batch_of([2, 3])]
    assert dealer.deal(full, [2, 2]) is not None
    assert dealer.deal(full[:1], [2]) is None
    assert dealer.deal([full[0], batch_of([2])], [2, 1]) is None


def test_full_batches_are_handed_on_as_the_same_objects():
    batches = [object(), object()]
    assert Dealer(shards=2, batch_rows=5).deal(batches, [5, 5]).parts == tuple(batches)


def test_ragged_batches_are_dealt_undivided():
    wide, narrow = torch.zeros(2, 9), torch.zeros(2, 3)
    dealt = Dealer(shards=4, batch_rows=2).deal([wide, narrow], [2, 2])
    assert [part.shape for part in dealt.parts] == [(2, 9), (2, 3), (2, 9), (2, 3)]
    assert dealt.counts == (2, 2, 0, 0)


def test_batches_of_no_fixed_size_are_dealt_undivided_and_counted():
    batches = [torch.zeros(3), torch.zeros(5)]
    dealt = Dealer(shards=3).deal(batches, [3, 5])
    assert [part.shape for part in dealt.parts] == [(3,), (5,), (3,)]
    assert dealt.counts == (3, 5, 0)
    assert Dealer(shards=3).deal(batches, [1, 1]).counts == (1, 1, 0)


class Graphs:
    """A batch whose rows only its own library can cut."""


UNCUT = {
    "objects": [Graphs(), Graphs()],
    "objects beside rows": [(Graphs(), torch.zeros(4)), (Graphs(), torch.zeros(2))],
    "samples in one row": [torch.arange(5)[None], torch.arange(3)[None]],
    "samples left out": [torch.zeros(3), torch.zeros(2)],
    "none beside rows": [{"x": torch.zeros(4), "y": None}, {"x": torch.zeros(2), "y": torch.zeros(2)}],
    "sums": [1.5, 2.5],
}


@pytest.mark.parametrize("batches", UNCUT.values(), ids=UNCUT)
def test_batches_in_which_rows_cannot_be_told_are_dealt_undivided(batches):
    dealt = Dealer(shards=2, batch_rows=4).deal(batches, [4, 2])
    assert [part is batch for part, batch in zip(dealt.parts, batches, strict=True)] == [True, True]
    assert dealt.counts == (4, 2)


@pytest.mark.parametrize("name", ["objects", "objects beside rows", "samples in one row"])
def test_one_such_batch_alone_is_repeated_and_counted_once(name):
    batch = UNCUT[name][0]
    dealt = Dealer(shards=2, batch_rows=4).deal([batch], [4])
    assert [part is batch for part in dealt.parts] == [True, True]
    assert dealt.counts == (4, 0)


def images(count, *, channels=3, ragged=False):
    return [torch.full((channels, 4, 4 + number * ragged), float(number)) for number in range(count)]


@pytest.mark.parametrize(
    "make",
    [list, tuple, lambda samples: {"x": samples, "n": torch.zeros(len(samples))}],
    ids=["list", "tuple", "beside a column"],
)
@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
@pytest.mark.parametrize(("shards", "counts"), [(2, [3]), (2, [2, 1]), (4, [3, 3]), (3, [2]), (4, [3, 2])], ids=str)
def test_as_many_images_as_they_have_channels_stay_whole(make, ragged, shards, counts):
    batches = [make(images(count, ragged=ragged)) for count in counts]
    dealt = Dealer(shards=shards, batch_rows=max(counts) + (len(counts) < 2)).deal(batches, counts)
    for part in dealt.parts:
        held = part["x"] if isinstance(part, dict) else part
        assert {image.shape[0] for image in held} == {3}
    assert sum(dealt.counts) == sum(counts)


def test_what_all_batches_have_alike_stays_beside_their_rows():
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
    batches = [(torch.arange(4), weights, "images"), (torch.arange(4, 6), weights.clone(), "images")]
    dealt = Dealer(shards=2, batch_rows=4).deal(batches, [4, 2])
    assert [part[0].tolist() for part in dealt.parts] == [[0, 1, 2], [3, 4, 5]]
    assert [part[1:] for part in dealt.parts] == [(weights, "images")] * 2


@pytest.mark.parametrize("batch", [Graphs(), torch.arange(5)[None]], ids=["objects", "samples in one row"])
def test_a_batch_that_split_batches_cannot_cut_is_refused(batch):
    with pytest.raises(DataError, match=r"split_batches cuts a batch of 4 samples.*slice_fn_for_dispatch"):
        Dealer(shards=2, batch_rows=4, split=True).deal([batch], [4])
    dealt = Dealer(shards=2, batch_rows=4, split=True, slice_fn=lambda *_, **__: "cut").deal([batch], [4])
    assert dealt.parts == ("cut", "cut")


def test_a_slice_function_is_given_joined_batches_and_the_rank():
    def slice_fn(batch, wanted, process_index, num_processes):
        return batch[wanted], process_index, num_processes

    dealt = Dealer(shards=2, batch_rows=2, slice_fn=slice_fn).deal([torch.tensor([0, 1]), torch.tensor([2, 3])], [2, 2])
    assert [(x.tolist(), rank, ranks) for x, rank, ranks in dealt.parts] == [([0, 1], 0, 2), ([2, 3], 1, 2)]


def test_a_list_of_columns_is_a_container_and_a_list_of_rows_is_not():
    columns = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert [column.tolist() for column in slice_rows(columns, slice(0, 1), 2)] == [[1], [3]]
    ragged = [torch.zeros(3, 4), torch.zeros(1, 4)]
    assert slice_rows(ragged, slice(1, 2), 2)[0] is ragged[1]


def test_a_ragged_sample_as_long_as_the_batch_makes_no_container_of_it():
    ragged = [torch.zeros(2, 4), torch.zeros(5, 4)]
    assert [len(sample) for sample in slice_rows(ragged, slice(1, 2), 2)] == [5]
    mixed = [torch.tensor([1, 2]), torch.zeros(3, 3, dtype=torch.float64)]
    assert slice_rows(mixed, slice(0, 1), 2)[1] is mixed[1]


def test_columns_in_containers_of_a_list_are_columns_with_as_many_containers_as_rows():
    two = [{"image": torch.tensor([1, 2])}, {"mask": [torch.tensor([3, 4])]}]
    assert slice_rows(two, slice(1, 2), 2) == [{"image": torch.tensor([2])}, {"mask": [torch.tensor([4])]}]
    views = [{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3, 4])}]
    assert slice_rows(views, slice(1, 2), 2) == [{"x": torch.tensor([2])}, {"x": torch.tensor([4])}]
    samples = [{"x": torch.zeros(2)}, {"x": torch.zeros(5)}]
    assert slice_rows(samples, slice(1, 2), 2) == [samples[1]]


@pytest.mark.parametrize("rows", [2, 3])
def test_strings_follow_their_rows_through_torchs_default_collation(rows):
    """Which makes a tuple of the strings of tuple samples."""
    batch = torch.utils.data.default_collate([(torch.tensor(i), f"a{i}", f"b{i}") for i in range(rows)])
    numbers, *names = slice_rows(batch, slice(1, rows), rows)
    assert names == [tuple(f"{letter}{i}" for i in numbers.tolist()) for letter in "ab"]
    words = torch.utils.data.default_collate([(f"a{i}", f"b{i}") for i in range(rows)])
    assert slice_rows(words, slice(1, rows), rows) == [column[1:] for column in words]
    assert join_rows([words, words], [rows, rows]) == [column + column for column in words]


def test_repeating_more_rows_than_there_are_starts_again():
    assert ids_of(repeat_rows(batch_of([5, 6]), 2, 5)) == [5, 6, 5, 6, 5]


def test_batches_with_other_keys_do_not_join():
    with pytest.raises(ValueError, match="batches hold"):
        join_rows([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], [1, 1])


CONTENTS = [
    torch.arange(6).view(2, 3),
    torch.tensor(2.5),
    torch.zeros(0, 4, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.complex64),
    torch.ones(4, 6).t()[::2],
    torch.randn(2, requires_grad=True),
    {"a": [torch.ones(1), "text", None], "b": (1, 2.5, b"bytes")},
    Pair(torch.ones(1), "x"),
    UserDict(x=torch.ones(2)),
    torch.eye(3).to_sparse(),
    [],
    [torch.arange(70_000), torch.tensor(True), torch.randn(200, 300), torch.randn(300, 200).t(), torch.arange(3)],
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: type(content).__name__)
def test_packing_keeps_values_types_and_shapes(content):
    def same(a, b):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a.detach().to_dense(), b.to_dense())
        elif isinstance(a, dict | UserDict):
            assert a.keys() == b.keys()
            for key in a:
                same(a[key], b[key])
        elif isinstance(a, list | tuple):
            for x, y in zip(a, b, strict=True):
                same(x, y)
        else:
            assert a == b

    same(content, roundtrip(content))


def test_one_tensor_in_two_places_stays_one_value():
    shared = torch.arange(3)
    first, second = roundtrip([shared, shared])
    assert first.tolist() == second.tolist() == [0, 1, 2]


def test_dataclasses_travel():
    received = roundtrip(Example(torch.ones(2), ["a", "b"]))
    assert received.x.tolist() == [1, 1]
    assert received.names == ["a", "b"]


def test_absence_is_one_object_everywhere():
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT


@given(st.lists(st.tuples(st.sampled_from([torch.int64, torch.float16, torch.uint8]), st.integers(0, 9)), max_size=6))
def test_tensors_of_any_size_find_their_place(kinds):
    tensors = [torch.arange(size).to(dtype) for dtype, size in kinds]
    received = roundtrip(tensors)
    assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in tensors]


def test_full_steps_of_batches_of_other_sizes_are_counted():
    dealt = Dealer(shards=2).deal([torch.zeros(3), torch.zeros(5)], [3, 5])
    assert dealt.counts == dealt.sizes == (3, 5)
    assert Dealer(shards=2).deal([torch.zeros(3), torch.zeros(3)], [3, 3]).counts is None


def test_an_error_of_the_slice_function_is_raised():
    def slice_fn(batch, wanted):
        return batch[wanted]

    with pytest.raises(TypeError, match="process_index"):
        Dealer(shards=2, batch_rows=2, slice_fn=slice_fn).deal([torch.zeros(2), torch.zeros(2)], [2, 2])
