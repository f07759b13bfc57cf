import json

import pytest
import torch

from accel_state.pytree.saved_shapes import is_extra_state, is_packed, shape_text, shapes_differ

NAME = "base.0.weight.quant_state.bitsandbytes__nf4"


def packed(**changed: object) -> torch.Tensor:
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 32], "nested_offset": 0.25}
    return torch.tensor([*json.dumps(facts | changed).encode()], dtype=torch.uint8)


def test_a_description_is_known_by_its_name() -> None:
    assert is_packed(NAME)
    assert not is_packed("base.0.weight")
    assert not is_packed("base.0.weight.absmax")


def test_descriptions_of_one_shape_may_have_other_numbers_and_lengths() -> None:
    assert packed().shape != packed(nested_offset=0.123456).shape
    assert not shapes_differ(NAME, packed(), packed(nested_offset=0.123456))
    assert not shapes_differ(NAME, packed(), packed(dtype="bfloat16"))
    assert not shapes_differ(NAME, packed(), packed().to("meta"))  # its values are not known


@pytest.mark.parametrize("changed", [{"shape": [32, 64]}, {"blocksize": 32}, {"quant_type": "fp4"}])
def test_other_shapes_and_blocks_differ_in_descriptions_of_one_length(changed: dict[str, object]) -> None:
    assert packed(**changed).shape == packed().shape
    assert shapes_differ(NAME, packed(), packed(**changed))


def test_what_is_no_description_differs_and_says_so() -> None:
    for broken in (torch.zeros(8, dtype=torch.uint8), torch.tensor([*b"[1]"], dtype=torch.uint8)):
        assert shapes_differ(NAME, packed(), broken)
        assert shape_text(NAME, broken) == "no description of a 4-bit weight"
    assert shapes_differ(NAME, packed(), "text")
    assert shape_text(NAME, packed()) == "about a weight of shape (64, 32) in blocks of 64 nf4 numbers"


def test_extra_states_have_no_shape_to_compare() -> None:
    assert is_extra_state("_extra_state")
    assert is_extra_state("norm._extra_state")
    assert not is_extra_state("my_extra_state")
    assert not shapes_differ("norm._extra_state", torch.ones(2), torch.ones(3))
    assert not shapes_differ("norm._extra_state", torch.ones(2), {"a": 1})


def test_what_is_no_tensor_is_named_by_its_type() -> None:
    assert shape_text("weight", "text") == "a str"


def test_other_tensors_are_compared_by_shape() -> None:
    assert shapes_differ("weight", torch.ones(2), torch.ones(3))
    assert not shapes_differ("weight", torch.ones(2), torch.zeros(2))
    assert shapes_differ("weight", torch.ones(2), 1.0)
    assert shape_text("weight", torch.ones(2, 3)) == "(2, 3)"
