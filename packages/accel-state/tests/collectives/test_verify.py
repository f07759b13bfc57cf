"""Processes that disagree about a collective all learn who differs and where, instead of waiting or mixing bytes."""

import collections
import contextlib
import logging
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_state import CollectiveError, CollectiveMismatchError, Session
from accel_state.collectives.tensors import (
    agree,
    all_gather_object,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel_state.collectives.verify import CollectiveCall, compare, describe, verify_collective
from accel_testing.programs.runs import run_command

# The hang watchdog compares operations, too, and would be first.
UNWATCHED = {"ACCEL_HANG_DOCTOR": "off"}
Pair = collections.namedtuple("Pair", ["x", "y"])


def calls(*trees, operation="gather", **arguments):
    return [describe(operation, tree, arguments) for tree in trees]


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    "tree",
    [ones(2), {"a": [ones(2), Pair(ones(), ones(0, 3))]}, None, [], {"a": "text"}],
    ids=["tensor", "nested", "nothing", "empty", "text"],
)
def test_equal_calls_are_fine(tree):
    assert compare(calls(tree, tree, tree)) is None


def test_the_order_in_which_a_dict_was_filled_is_fine():
    assert compare(calls({"a": ones(1), "b": ones(2)}, {"b": ones(2), "a": ones(1)})) is None


@pytest.mark.parametrize(
    ("trees", "subject", "texts"),
    [
        (
            ({"labels": [ones(2, 3)]}, {"labels": [ones(2, 3)]}, {"labels": [ones(4, 3)]}),
            "shape",
            ["Process 2 has shape [4, 3] at ['labels'][0], where process 0 has [2, 3]"],
        ),
        (
            ({"labels": ones(1)}, {"labels": ones(2)}, {"labels": ones(2)}),
            "shape",
            ["Process 0 has shape [1] at ['labels'], where process 1 has [2]"],
        ),
        (
            (ones(2), ones(2).long()),
            "dtype",
            ["Process 1 has int64 at the top, where process 0 has float32"],
        ),
        (
            ({"a": ones(1)}, {"a": ones(1), "b": ones(2)}),
            "structure",
            ["Process 1 has float32[2] at ['b'], where process 0 has nothing"],
        ),
        (
            (Pair(ones(1), ones(1)), Pair(ones(1), None)),
            "shape",
            ["Process 1 has NoneType at .y, where process 0 has float32"],
        ),
        (([ones(1)], (ones(1),)), "structure", ["Process 1 has the containers tuple(*), where process 0 has list(*)"]),
        (([], [ones(1)]), "structure", ["Process 1 has float32[1] at [0], where process 0 has nothing"]),
    ],
    ids=["shape", "majority", "dtype", "key", "leaf", "container", "empty"],
)
def test_differences_are_named_by_process_and_leaf(trees, subject, texts):
    found = compare(calls(*trees))
    assert f"Cannot apply desired operation due to {subject} mismatches." in found
    assert f"All {subject}s across devices must be valid." in found
    assert "Operation: `accel.utils.operations.gather`" in found
    for text in texts:
        assert f"  - {text}" in found


MISMATCH = """
import torch
from accel_state.collectives.verify import compare, describe

first, second = ({f"{kind}{n}": torch.ones(n) for n in range(8)} for kind in ("input", "label"))
print(compare([describe("gather", tree, {}) for tree in (first, second)]))
"""


def test_differences_are_in_the_order_of_the_leaves_whatever_the_hash_seed():
    run = run_command([sys.executable, "-c", MISMATCH], env=[{"PYTHONHASHSEED": seed} for seed in "12"]).check()
    assert run.outputs[0] == run.outputs[1]
    assert run.outputs[0].index("nothing at ['input0']") < run.outputs[0].index("nothing at ['input7']")


def test_every_process_has_its_line_of_shapes():
    found = compare(calls(ones(2), ones(3, 1))).splitlines()
    assert found[found.index("Input shapes:") + 1 :][:2] == ["  - Process 0: [2]", "  - Process 1: [3, 1]"]


def test_other_operations_are_listed_with_their_arguments():
    found = compare([*calls(ones(1)), *calls(ones(1), operation="reduce", reduction="sum")])
    assert "  - Process 0: gather()\n  - Process 1: reduce(reduction='sum')" in found


@pytest.mark.parametrize(("other", "fine"), [(ones(9, 9), True), (ones(2), False), (ones(2, 3).int(), False)])
def test_lengths_may_differ_where_they_are_about_to_be_padded(other, fine):
    assert (compare(calls(ones(2, 3), other), exact_shapes=False) is None) is fine


def test_a_call_survives_json():
    (call,) = calls({"a": [ones(2), "x"]}, dim=1)
    assert CollectiveCall.from_json(call.to_json()) == call


def test_a_tensor_on_another_device_than_the_session_is_named():
    with Session.open(cpu=True):
        found = compare(calls({"a": torch.ones(1, device="meta")}))
    assert "Process 0 has a tensor on meta at ['a'], but its session is configured for cpu" in found


def deliberately(rank, operation):
    """Each operation with arguments that fit together on all ranks."""
    data = {"a": ones(2), "b": (torch.tensor(rank),)}
    return {
        "gather": lambda: gather(data, verify=True),
        "broadcast": lambda: broadcast(data, 1, verify=True),
        "reduce": lambda: reduce(data, "sum", verify=True),
        "pad": lambda: pad_across_processes([ones(rank + 1)], verify=True),
        "gather_object": lambda: gather_object([rank], verify=True),
        "all_gather_object": lambda: all_gather_object(rank, verify=True),
        "broadcast_object_list": lambda: broadcast_object_list([rank], verify=True),
    }[operation]()


OPERATIONS = ["gather", "broadcast", "reduce", "pad", "gather_object", "all_gather_object", "broadcast_object_list"]


@pytest.mark.ranks(2, env=UNWATCHED)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fits_together_runs(rank, operation):
    for _ in range(3):
        deliberately(rank, operation)


@pytest.mark.ranks(2, env=UNWATCHED)
@pytest.mark.parametrize("other", [name for name in OPERATIONS if name != "gather"])
def test_ranks_in_different_operations_both_learn_it(rank, other):
    with pytest.raises(
        CollectiveMismatchError, match=r"different operations:\n  - Process 0: gather\(\)\n  - Process 1"
    ):
        deliberately(rank, "gather" if rank == 0 else other)
    assert all_gather_object(rank) == [0, 1]


@pytest.mark.ranks(2, env=UNWATCHED)
@pytest.mark.parametrize(
    "call",
    [gather, reduce, broadcast, pad_across_processes],
    ids=["gather", "reduce", "broadcast", "pad_across_processes"],
)
def test_a_session_in_debug_verifies_every_operation(rank, call):
    with Session.open(cpu=True, debug=True):
        data = {"tensor": ones(1, 5) if rank == 0 else ones(1, 1, 6)}
        with pytest.raises(CollectiveMismatchError) as caught:
            call(data)
    text = str(caught.value)
    assert "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid." in text
    assert f"`accel.utils.operations.{call.__name__}`" in text
    assert "  - Process 0: {'tensor': [1, 5]}\n  - Process 1: {'tensor': [1, 1, 6]}" in text
    if call is pad_across_processes:
        assert text.startswith("Error found while calling `accel.utils.operations.pad_across_processes`. Please see")


@pytest.mark.ranks(4, env=UNWATCHED)
def test_the_odd_one_out_of_four_is_named(rank):
    data = {"labels": [ones(2 + (rank == 2))]}
    with pytest.raises(CollectiveMismatchError) as caught:
        gather(data, verify=True)
    assert str(caught.value).count("has shape") == 1
    assert "Process 2 has shape [3] at ['labels'][0], where process 0 has [2]" in str(caught.value)


@pytest.mark.ranks(4, env=UNWATCHED)
def test_subgroups_are_verified_by_themselves(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    gather(ones(1 + rank // 2), group=mine, verify=True)
    with pytest.raises(CollectiveMismatchError, match="Process 1 has shape") if rank < 2 else contextlib.nullcontext():
        gather(ones(1 + (rank == 1)), group=mine, verify=True)


@pytest.mark.ranks(2, env=UNWATCHED)
def test_agree_is_verified_in_debug(rank):
    with Session.open(cpu=True, debug=True), pytest.raises(CollectiveMismatchError, match="agree"):
        agree(None) if rank == 0 else gather(ones(1))


@pytest.mark.ranks(2, env=UNWATCHED)
@pytest.mark.fault
def test_a_rank_that_never_comes_is_named_with_what_it_did_last(rank):
    group = dist.group.WORLD
    reduce(ones(1), "sum", verify=True)
    if rank == 0:
        with pytest.raises(CollectiveError) as caught:
            verify_collective("gather", ones(1), group, timeout=timedelta(seconds=1))
        assert "gather() waited 1 s for process 1 (last seen in reduce(reduction='sum', scale=1.0)" in str(caught.value)
        assert "1 of 2 verified operations" in str(caught.value)
    dist.barrier()


@pytest.mark.ranks(2, env=UNWATCHED)
@pytest.mark.fault
def test_whom_one_waits_for_is_logged_before_the_timeout(rank, monkeypatch):
    monkeypatch.setattr("accel_state.collectives.verify._IMPATIENT", timedelta(seconds=1))
    told = []
    monkeypatch.setattr(
        logging.getLogger("accel_state.collectives.verify"), "warning", lambda text, *args: told.append(text % args)
    )
    if rank == 0:
        with pytest.raises(CollectiveError, match="never seen"):
            verify_collective("gather", ones(1), dist.group.WORLD, timeout=timedelta(seconds=2))
        assert told == ["gather() has waited 1 s for process 1 (never seen; 0 of 1 verified operations)"]
    dist.barrier()
