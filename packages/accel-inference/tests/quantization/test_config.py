"""Options of quantization are checked when they are made."""

import pytest
import torch

from accel_inference.quantization.config import BnbQuantizationConfig, TorchAOQuantizationConfig
from accel_state.enums import CustomDtype


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "neither is set"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both are set"),
        ({"load_in_8bit": 1}, "load_in_8bit must be a boolean, got 1"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, r"\['fp4', 'nf4'\] but found 'nf5'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "found 'fp8'"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules must be a list of strings, got 'head'"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, "keep_in_fp32_modules must be a list"),
        ({"load_in_8bit": True, "torch_dtype": "float16"}, r"torch_dtype must be a torch\.dtype, got 'float16'"),
    ],
)
def test_wrong_options_of_bitsandbytes_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        BnbQuantizationConfig(**options)


@pytest.mark.parametrize(
    ("options", "dtype", "target"),
    [
        ({"load_in_8bit": True}, torch.float16, torch.int8),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "bf16"}, torch.bfloat16, CustomDtype.INT4),
        ({"load_in_4bit": True, "torch_dtype": torch.float32}, torch.float32, CustomDtype.INT4),
    ],
)
def test_the_dtype_of_other_weights_has_a_default(options, dtype, target):
    config = BnbQuantizationConfig(**options)
    assert config.torch_dtype is dtype
    assert config.target_dtype == target


def test_bits_of_torchao_are_kept_in_bytes():
    """Its packed layouts of 4 bits are for one kind of device each; the layout for all has a byte for each number."""
    assert {TorchAOQuantizationConfig(weights=one).target_dtype for one in ("int8", "int4", "fp8")} == {torch.int8}


def test_a_threshold_without_8_bits_is_warned_of():
    with pytest.warns(UserWarning, match="can only be used for model loaded in 8bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "int3"}, "weights is 'int3'; expected one of int8, int4, fp8"),
        ({"group_size": 0}, "group_size is 0"),
        ({"skip_modules": ("head",)}, "skip_modules must be a list of strings"),
    ],
)
def test_wrong_options_of_torchao_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        TorchAOQuantizationConfig(**options)
