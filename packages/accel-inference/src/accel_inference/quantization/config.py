"""Configurations of quantization, one for each library."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from warnings import warn

import torch

from accel_state.enums import CustomDtype

_COMPUTE: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TYPES_4BIT = ("fp4", "nf4")
AOWeights = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class BnbQuantizationConfig:
    """Linear layers in 8 or 4 bits by bitsandbytes, with Accelerate's fields.

    Attributes:
        load_in_8bit: int8 weights with a scale for each row; columns of inputs beyond the threshold in full precision.
        llm_int8_threshold: magnitude of an input from which its column is computed in full precision.
        load_in_4bit: 4-bit weights with a scale for each block of 64.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: whether the scales are quantized, too.
        bnb_4bit_compute_dtype: dtype of the products: "fp32", "fp16", "bf16" or a dtype of torch.
        torch_dtype: dtype of the weights that are not quantized; None: float16 for 8 bits, the compute dtype for 4.
        skip_modules: names of modules that are not quantized; None: tied ones and the head.
        keep_in_fp32_modules: names of modules that are loaded in float32 and not quantized.

    Raises:
        ValueError: a field has another type, or not exactly one of 8 and 4 bits is chosen.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in (bool, "bool") and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name} must be a boolean, got {getattr(self, field.name)!r}")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both are" if self.load_in_8bit else "neither is"
            raise ValueError(f"load_in_8bit and load_in_4bit: {both} set; set one of them")
        if self.bnb_4bit_quant_type not in _TYPES_4BIT:
            raise ValueError(
                f"bnb_4bit_quant_type must be in {list(_TYPES_4BIT)} but found {self.bnb_4bit_quant_type!r}"
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn("llm_int8_threshold can only be used for model loaded in 8bit", stacklevel=3)
        if isinstance(self.torch_dtype, str) or not isinstance(self.torch_dtype, torch.dtype | None):
            raise ValueError(f"torch_dtype must be a torch.dtype, got {self.torch_dtype!r}")
        _check_names(self)
        _set(self, "bnb_4bit_compute_dtype", _compute_dtype(self.bnb_4bit_compute_dtype))
        if self.torch_dtype is None:
            _set(self, "torch_dtype", torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype)

    @property
    def target_dtype(self) -> CustomDtype | torch.dtype:
        """Dtype of quantized weights, for the sizes of modules."""
        return CustomDtype.INT4 if self.load_in_4bit else torch.int8


@dataclass(frozen=True)
class TorchAOQuantizationConfig:
    """Linear layers with weights in 8 or 4 bits by torchao; products are in the dtype of the inputs.

    Attributes:
        weights: "int8" with a scale for each row, "int4" with a scale for each group, or "fp8" (e4m3) for each row.
            Numbers of "int4" take a byte each, in the layout of torchao that all devices have.
        group_size: columns of a group of "int4"; layers whose columns it does not divide stay in ``torch_dtype``.
        torch_dtype: dtype of the weights that are not quantized.
        skip_modules: names of modules that are not quantized; None: tied ones and the head.
        keep_in_fp32_modules: names of modules that are loaded in float32 and not quantized.

    Raises:
        ValueError: a field has another type or value.
    """

    weights: AOWeights = "int8"
    group_size: int = 32
    torch_dtype: torch.dtype = torch.bfloat16
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.weights not in get_args(AOWeights):
            raise ValueError(f"weights is {self.weights!r}; expected one of {', '.join(get_args(AOWeights))}")
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; expected a number of columns from 1")
        _check_names(self)

    @property
    def target_dtype(self) -> CustomDtype | torch.dtype:
        """Dtype of quantized weights, for the sizes of modules: a byte for each number, also for "int4"."""
        return torch.int8


QuantizationConfig = BnbQuantizationConfig | TorchAOQuantizationConfig


def _check_names(config: Any) -> None:
    for name in ("skip_modules", "keep_in_fp32_modules"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(one, str) for one in value)):
            raise ValueError(f"{name} must be a list of strings, got {value!r}")


def _compute_dtype(given: str | torch.dtype) -> torch.dtype:
    found = _COMPUTE.get(given) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ValueError(f"bnb_4bit_compute_dtype must be in {list(_COMPUTE)} or a torch.dtype, but found {given!r}")
    return found


def _set(config: Any, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)
