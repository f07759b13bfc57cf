"""Constants have the values that users of Accelerate test against."""

from torch import nn

from accel.utils import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, WEIGHTS_NAME


def test_layers_that_are_cast_are_classes():
    assert isinstance(nn.Linear(1, 1), SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    assert not isinstance(nn.LayerNorm(1), SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)


def test_files_of_weights_have_their_names():
    assert WEIGHTS_NAME == "pytorch_model.bin"
