"""Each its part of the inputs; one before the others; one instead of all."""

import collections
import contextlib
import copy
import io

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import CollectiveError, Session, Topology
from accel_state.process import split

Pair = collections.namedtuple("Pair", ["x", "y"])
worlds = st.integers(1, 6)
KINDS = {
    "list": list,
    "tuple": tuple,
    "tensor": lambda items: torch.tensor(list(items), dtype=torch.int64),
    "array": lambda items: numpy.array(items, dtype=numpy.int64),
    "range": lambda items: items,
}


def parts(inputs, world_size, padding=False):
    return [split(inputs, rank=rank, world_size=world_size, padding=padding) for rank in range(world_size)]


def as_list(part):
    return part.tolist() if isinstance(part, torch.Tensor | numpy.ndarray) else list(part)


@given(st.integers(0, 20), worlds, st.sampled_from(sorted(KINDS)))
def test_parts_in_order_are_the_input(length, world_size, kind):
    inputs = KINDS[kind](range(length))
    found = parts(inputs, world_size)
    assert [item for part in found for item in as_list(part)] == list(range(length))
    assert all(type(part) is type(inputs) for part in found)
    lengths = [len(part) for part in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(0, 20), st.integers(2, 6), st.sampled_from(sorted(KINDS)))
def test_padded_parts_are_equally_long_and_cut_back_to_the_input(length, world_size, kind):
    found = parts(KINDS[kind](range(length)), world_size, padding=True)
    assert {len(part) for part in found} == {-(-length // world_size)}
    items = [item for part in found for item in as_list(part)]
    assert items[:length] == list(range(length))
    assert set(items[length:]) <= {length - 1}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_first_ranks_get_the_extra_items(world_size):
    share, extra = divmod(17, world_size)
    assert [len(part) for part in parts(list(range(17)), world_size)] == [
        share + (rank < extra) for rank in range(world_size)
    ]


@given(st.integers(0, 9), worlds, st.booleans())
def test_mappings_are_split_value_by_value_and_left_alone(length, world_size, padding):
    nested = {"c": torch.arange(length), "f": numpy.arange(length)}
    inputs = {"a": list(range(length)), "b": nested, "d": tuple(range(length)), "e": "text"}
    before = copy.deepcopy(inputs)
    found = parts(inputs, world_size, padding)
    assert inputs["a"] == before["a"]
    assert torch.equal(inputs["b"]["c"], before["b"]["c"])
    for rank, part in enumerate(found):
        assert part["a"] == as_list(part["b"]["c"]) == as_list(part["b"]["f"]) == list(part["d"])
        assert part["a"] == split(before["a"], rank=rank, world_size=world_size, padding=padding)
        assert part["e"] == "text"


@pytest.mark.parametrize(
    "inputs",
    [
        collections.OrderedDict(a=[1, 2, 3]),
        collections.UserDict(a=[1, 2, 3]),
        collections.defaultdict(list, a=[1, 2, 3]),
    ],
    ids=lambda inputs: type(inputs).__name__,
)
def test_kinds_of_mapping_are_kept(inputs):
    first, second = parts(inputs, 2)
    assert type(first) is type(inputs)
    assert (first["a"], second["a"], inputs["a"]) == ([1, 2], [3], [1, 2, 3])


def test_namedtuples_are_split_field_by_field():
    assert parts(Pair([1, 2], (3, 4)), 2) == [Pair([1], (3,)), Pair([2], (4,))]


@pytest.mark.parametrize("inputs", ["text", 5, None, torch.tensor(3), numpy.array(3)])
def test_what_has_no_items_is_given_whole(inputs):
    assert all(part is inputs for part in parts(inputs, 3, padding=True))


def test_one_process_gets_the_very_object():
    inputs = {"a": [1], "b": [1, 2]}
    assert split(inputs, rank=0, world_size=1, padding=True) is inputs


def test_values_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same length.*'a': 1.*'b': 2"):
        split({"a": [1], "b": [1, 2]}, rank=0, world_size=2)


def test_rows_of_a_tensor_are_padded_with_its_last_row():
    rows = torch.arange(6).reshape(3, 2)
    found = parts(rows, 2, padding=True)
    assert all((part == array).all() for part, array in zip(found, parts(rows.numpy(), 2, padding=True), strict=True))
    assert torch.equal(torch.cat(found), torch.cat([rows, rows[-1:]]))


def test_decorated_functions_keep_their_metadata_and_decide_when_called():
    with Session.open(cpu=True, topology=Topology()) as session:

        @session.on_main_process
        def bare(value: int) -> int:
            """Doc."""
            return value + 1

        @session.on_main_process()
        def called():
            return "ran"

        assert (bare.__name__, bare.__doc__, bare(1), called()) == ("bare", "Doc.", 2, "ran")
        assert session.on_process(bare, process_index=7)(1) == 2  # alone, any number is ours
        with pytest.raises(ValueError, match="process_index must be given"):
            session.on_process(bare)


@pytest.mark.ranks(3)
def test_each_decorator_runs_on_its_processes(rank, world_size):
    with Session.open(cpu=True) as session:
        ran = {
            "main": session.on_main_process(lambda: True)(),
            "local": session.on_local_main_process(lambda: True)(),
            "last": session.on_last_process(lambda: True)(),
            "one": session.on_process(lambda: True, process_index=1)(),
            "local one": session.on_local_process(local_process_index=1)(lambda: True)(),
        }
    assert ran == {
        "main": rank == 0 or None,
        "local": rank == 0 or None,
        "last": rank == world_size - 1 or None,
        "one": rank == 1 or None,
        "local one": rank == 1 or None,
    }


@pytest.mark.ranks(3)
def test_main_process_goes_first(rank, tmp_path):
    with Session.open(cpu=True) as session:
        with session.main_process_first():
            seen = sorted(path.name for path in tmp_path.iterdir())
            (tmp_path / str(rank)).touch()
        assert ("0" in seen) == (rank != 0)
        session.wait_for_everyone()
        with session.local_main_process_first():
            seen = (tmp_path / "local").exists()
            (tmp_path / "local").touch()
        assert seen == (rank != 0)


@pytest.mark.ranks(3)
def test_a_failure_in_the_first_block_reaches_all(rank):
    entered = []
    expected = KeyError if rank == 0 else CollectiveError
    with Session.open(cpu=True) as session:

        def prepare():
            with session.main_process_first():
                entered.append(rank)
                raise KeyError("no such dataset")

        with pytest.raises(expected) as caught:
            prepare()
        if rank != 0:
            assert not entered
            assert "0" in str(caught.value)
            assert "no such dataset" in str(caught.value)
        session.wait_for_everyone()  # and the group still works


@pytest.mark.ranks(2)
def test_a_session_splits_and_prints_once(rank):
    with contextlib.redirect_stdout(io.StringIO()) as screen, Session.open(cpu=True) as session:
        with session.split_between_processes([1, 2, 3]) as mine:
            assert mine == ([1, 2] if rank == 0 else [3])
        with session.split_between_processes([1, 2, 3], apply_padding=True) as mine:
            assert sum(session.gather_object(mine)) == 9
        session.print("once")
    assert screen.getvalue() == ("once\n" if rank == 0 else "")
