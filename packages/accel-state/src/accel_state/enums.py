"""Enumerations of the values that settings accept."""

from enum import Enum, EnumMeta


class _Lenient(EnumMeta):
    """Makes ``value in SomeEnum`` return False for values of other types instead of raising."""

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=_Lenient):
    """An enum whose members print as their values and whose class lists its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Returns all values as text, in order of definition."""
        return [str(member) for member in cls]


class DistributedType(str, Enum):
    """Kind of distributed run: the device type of its processes, or the backend that trains the model."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class LoggerType(BaseEnum):
    """Experiment trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class CustomDtype(Enum):
    """Dtypes below 8 bits, and fp8, for which memory is estimated although torch has no such dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(BaseEnum):
    """Compression of gradients in DDP's communication hook."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
