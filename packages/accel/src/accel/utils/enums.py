"""Enumerations that exist because Accelerate has them; accel itself takes the plain values."""

from enum import Enum
from typing import Any

from accel_state.enums import BaseEnum


class SageMakerDistributedType(str, Enum):
    """Distributed modes of SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, Enum):
    """Libraries for float8 computation. Lower-case names are accepted."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class ComputeEnvironment(str, Enum):
    """Machine or service that a run is started on."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backends of ``torch.compile``; NO disables compilation. Lower-case names are accepted."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class PrecisionType(str, BaseEnum):
    """Mixed-precision modes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random number generators that can be synchronised."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"
