"""Constants and names of types of Accelerate that accel has no use for."""

from types import MappingProxyType
from typing import Final, Literal

import torch

TENSOR_TYPE_TO_INT: Final = MappingProxyType(
    {
        torch.float: 1,
        torch.double: 2,
        torch.half: 3,
        torch.bfloat16: 4,
        torch.uint8: 5,
        torch.int8: 6,
        torch.int16: 7,
        torch.int32: 8,
        torch.int64: 9,
        torch.bool: 10,
    }
)
"""Numbers of dtypes."""

TENSOR_INT_TO_DTYPE: Final = MappingProxyType({number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()})
"""Dtypes by their numbers."""

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
SharedDict = dict
