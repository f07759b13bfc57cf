"""A comparison names the tensor, the distance and the first place."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_testing.equivalence.compare import assert_close_state, assert_equal_state, compare_trees
from accel_testing.equivalence.models import TinyMLP


def test_equal_states_pass() -> None:
    model = TinyMLP()
    assert_equal_state(model, model.state_dict())


def test_tensor_distance_and_place_are_named() -> None:
    expected = {"layer": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}}
    actual = {"layer": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}}
    actual["layer"]["weight"][1, 2] = 1.5
    with pytest.raises(AssertionError) as caught:
        assert_close_state(actual, expected, names=("ddp", "one process"))
    head, line = str(caught.value).splitlines()
    assert head == "one tensor differs between ddp and one process:"
    assert line == "  layer.weight: off by 0.5 (0.5 relative) in 1 of 6 elements, first at [1, 2]"


def test_worst_is_listed_first() -> None:
    expected = {name: torch.ones(1) for name in "abc"}
    actual = {"a": torch.tensor([1.1]), "b": torch.tensor([3.0]), "c": torch.tensor([1.0])}
    with pytest.raises(AssertionError, match=r"(?s)2 tensors differ:\n  b: .*\n  a: "):
        assert_close_state(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        ({"a": torch.ones(2)}, {}, "a: only in the first"),
        ({}, {"b": torch.ones(2)}, "b: only in the second"),
        ([torch.ones(2)], [torch.ones(3)], "0: shape (2,) is not (3,)"),
        ([torch.ones(2)], [torch.ones(2).double()], "0: dtype torch.float32 is not torch.float64"),
        (
            [torch.tensor([1, 2])],
            [torch.tensor([1, 3])],
            "0: off by 1 (0.333 relative) in 1 of 2 elements",
        ),
        ([{"step": 3}], [{"step": 4}], "0.step: 3 is not 4"),
        ([1], [True], "0: 1 is not True"),
        ([torch.tensor([math.nan])], [torch.tensor([1.0])], "0: off by inf"),
    ],
)
def test_what_cannot_be_equal_is_said(actual: object, expected: object, words: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_close_state(actual, expected)


def test_nan_and_infinity_equal_themselves() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert_equal_state([values, math.nan], [values.clone(), math.nan])


def test_tolerance_is_that_of_the_dtype() -> None:
    near = 1 + 1e-7
    assert_close_state([torch.tensor([near], dtype=torch.float32)], [torch.ones(1)])
    with pytest.raises(AssertionError):
        assert_close_state([torch.tensor([near], dtype=torch.float64)], [torch.ones(1, dtype=torch.float64)])


@given(st.floats(1e-3, 1e3), st.floats(0, 0.1))
def test_relative_distance_is_to_the_largest_expected(scale: float, off: float) -> None:
    expected = torch.tensor([scale, 0.0], dtype=torch.float64)
    actual = expected + torch.tensor([0.0, scale * off], dtype=torch.float64)
    found = compare_trees([actual], [expected], rtol=0.05)
    assert bool(found) == (off > 0.05)


def test_modules_count_as_their_state() -> None:
    linear = nn.Linear(2, 2)
    assert not compare_trees(linear, linear)
