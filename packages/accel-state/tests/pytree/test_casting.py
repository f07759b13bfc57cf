"""Results come out in float32, however nested."""

import pickle

import pytest
import torch

from accel_state import ConvertOutputsToFp32, convert_outputs_to_fp32


def forward(x):
    """Halves."""
    return {"loss": x.half(), "all": [x.bfloat16(), x.double(), "text"]}


@pytest.mark.parametrize("wrap", [ConvertOutputsToFp32, convert_outputs_to_fp32])
def test_results_are_float32_and_the_rest_as_it_was(wrap):
    wrapped = wrap(forward)
    found = wrapped(torch.ones(2))
    assert [found["loss"].dtype, found["all"][0].dtype, found["all"][1].dtype] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]
    assert found["all"][2] == "text"
    assert wrapped.__wrapped__ is forward
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Halves.")


def test_pickling_says_to_unwrap_first():
    with pytest.raises(pickle.PicklingError, match="unwrap"):
        pickle.dumps(ConvertOutputsToFp32(forward))
