"""Probes for optional libraries and device types.

A probe is called like a function. It looks up the package and its metadata without importing, so that a stray folder of
the same name does not count and the call is cheap. Probes for devices use ``accel_state.device.device``.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from accel.utils.versions import Version, compare_versions, installed_version, is_torch_version
from accel_state.device.device import count_devices
from accel_state.device.kinds import DEVICE_KINDS
from accel_state.environment import parse_flag


@final
@dataclass(frozen=True, slots=True)
class PackageProbe:
    """Probe: whether a package can be imported and one of its distributions is installed in an allowed version.

    ``metadata`` lists the distributions that may provide it, by default the package's own name; ``requires`` holds
    bounds such as ``(">=", "0.8.0")``; ``gate`` is a variable that must also be true.
    """

    package: str
    metadata: tuple[str, ...] = ()
    requires: tuple[str, str] | None = None
    gate: str | None = None

    def __call__(self) -> bool:
        """Whether the package is available as described."""
        if self.gate is not None and not parse_flag(os.environ, self.gate):
            return False
        if not has_package(self.package):
            return False
        versions = [installed_version(name) for name in self.metadata or (self.package,)]
        found = [version for version in versions if version is not None]
        return bool(found) and (self.requires is None or compare_versions(found[0], *self.requires))

    def at_least(self, min_version: str | None) -> bool:
        """Whether the package is available in ``min_version`` or newer (None: any version)."""
        if min_version is None:
            return self()
        return PackageProbe(self.package, self.metadata, (">=", min_version), self.gate)()


def has_package(name: str) -> bool:
    """Whether ``import name`` would find a module; nothing is imported."""
    from importlib.util import find_spec

    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


is_aim_available: Final = PackageProbe("aim", requires=("<", "4.0.0"))
is_amdsmi_available: Final = PackageProbe("amdsmi")
is_4bit_bnb_available: Final = PackageProbe("bitsandbytes", requires=(">=", "0.39.0"))
is_8bit_bnb_available: Final = PackageProbe("bitsandbytes", requires=(">=", "0.37.2"))
is_boto3_available: Final = PackageProbe("boto3")
is_clearml_available: Final = PackageProbe("clearml")
is_comet_ml_available: Final = PackageProbe("comet_ml", metadata=("comet_ml", "comet-ml"))
is_datasets_available: Final = PackageProbe("datasets")
is_deepspeed_available: Final = PackageProbe("deepspeed")
is_dvclive_available: Final = PackageProbe("dvclive")
is_import_timer_available: Final = PackageProbe("import_timer", metadata=("import_timer", "import-timer"))
is_lomo_available: Final = PackageProbe("lomo_optim", metadata=("lomo_optim", "lomo-optim"))
is_matplotlib_available: Final = PackageProbe("matplotlib")
is_mlflow_available: Final = PackageProbe("mlflow", metadata=("mlflow", "mlflow-skinny"))
is_msamp_available: Final = PackageProbe("msamp", metadata=("ms-amp",))
is_pandas_available: Final = PackageProbe("pandas")
is_peft_available: Final = PackageProbe("peft")
is_pynvml_available: Final = PackageProbe("pynvml", metadata=("nvidia-ml-py", "pynvml"))
is_pytest_available: Final = PackageProbe("pytest")
is_rich_available: Final = PackageProbe("rich", gate="ACCELERATE_ENABLE_RICH")
is_sagemaker_available: Final = PackageProbe("sagemaker")
is_schedulefree_available: Final = PackageProbe("schedulefree")
is_swanlab_available: Final = PackageProbe("swanlab")
is_tensorboardx_available: Final = PackageProbe("tensorboardX")
is_timm_available: Final = PackageProbe("timm")
is_torchao_available: Final = PackageProbe("torchao", requires=(">=", "0.6.1"))
is_torchdata_available: Final = PackageProbe("torchdata")
is_torchdata_stateful_dataloader_available: Final = PackageProbe("torchdata", requires=(">=", "0.8.0"))
is_torchvision_available: Final = PackageProbe("torchvision")
is_tqdm_available: Final = PackageProbe("tqdm")
is_trackio_available: Final = PackageProbe("trackio")
is_transformers_available: Final = PackageProbe("transformers")
is_triton_available: Final = PackageProbe("triton", metadata=("triton", "triton-xpu", "pytorch-triton"))
is_wandb_available: Final = PackageProbe("wandb")

_BNB: Final = PackageProbe("bitsandbytes")
_NUMPY: Final = PackageProbe("numpy")
_TENSORBOARD: Final = PackageProbe("tensorboard")
_TRANSFORMER_ENGINE: Final = PackageProbe(
    "transformer_engine", metadata=("transformer-engine", "transformer_engine", "transformer-engine-torch")
)
_GAUDI_TRANSFORMER_ENGINE: Final = PackageProbe(
    "intel_transformer_engine", metadata=("intel-transformer-engine", "intel_transformer_engine")
)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in ``min_version`` or newer."""
    return _BNB.at_least(min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes supports devices besides CUDA. Imports it."""
    if not is_bnb_available():
        return False
    import importlib

    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", set())


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed in ``min_version`` or newer."""
    return _NUMPY.at_least(min_version)


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _TENSORBOARD() or is_tensorboardx_available()


def is_transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed: NVIDIA's, or Intel's on Gaudi."""
    return _GAUDI_TRANSFORMER_ENGINE() if is_hpu_available() else _TRANSFORMER_ENGINE()


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine supports MXFP8 on this GPU. Imports it and queries the GPU."""
    if not is_transformer_engine_available() or not is_cuda_available():
        return False
    import importlib

    supported, _ = importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()
    return bool(supported)


def is_fp8_available() -> bool:
    """Whether a library for float8 training is installed; does not check the hardware."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is requested by ``ACCELERATE_USE_MEGATRON_LM`` and megatron-core >= 0.8.0 is installed."""
    if not parse_flag(os.environ, "ACCELERATE_USE_MEGATRON_LM") or not has_package("megatron"):
        return False
    core = installed_version("megatron-core")
    return core is not None and core >= Version("0.8.0") and has_package("megatron.training")


def is_pippy_available() -> bool:
    """Whether torch has pipeline parallelism."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Whether ``torch.load(weights_only=True)`` is reliable in this version of torch."""
    return is_torch_version(">=", "2.4.0")


def is_torch_distributed_available() -> bool:
    """Whether this build of torch has torch.distributed."""
    import torch.distributed

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether this build of torch has Intel's collectives (XCCL)."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_xccl_available()


def _has_device(type_: str, check_device: bool = False) -> bool:
    """Whether a device of ``type_`` is available. Counting devices finds it, so ``check_device`` changes nothing."""
    return count_devices(type_) > 0


is_cuda_available: Final[Callable[[], bool]] = partial(_has_device, "cuda")
is_mlu_available: Final[Callable[..., bool]] = partial(_has_device, "mlu")
is_musa_available: Final[Callable[..., bool]] = partial(_has_device, "musa")
is_neuron_available: Final[Callable[..., bool]] = partial(_has_device, "neuron")
is_npu_available: Final[Callable[..., bool]] = partial(_has_device, "npu")
is_sdaa_available: Final[Callable[..., bool]] = partial(_has_device, "sdaa")
is_xpu_available: Final[Callable[..., bool]] = partial(_has_device, "xpu")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether a Gaudi is available; ``init_hccl`` also loads its collectives."""
    if count_devices("hpu") == 0:
        return False
    if init_hccl:
        import importlib

        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Whether the HPU is of the first generation, which supports neither float16 nor float8."""
    if not is_hpu_available():
        return False
    import importlib

    generation: object = importlib.import_module("habana_frameworks.torch.utils.experimental")._get_device_type()
    return str(generation).rpartition(".")[2] == "synDeviceGaudi"


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether Apple's GPU is available and torch is ``min_version`` or newer."""
    return is_torch_version(">=", min_version) and count_devices("mps") > 0


def is_rocm_available() -> bool:
    """Whether an AMD GPU is available, whose device type in torch is cuda."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_fp16_available() -> bool:
    """Whether float16 is supported: everywhere but on Gaudi's first generation."""
    return not is_habana_gaudi1()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether bfloat16 is supported: on TPUs, on CPUs, and on accelerators that report it.

    With ``ignore_tpu`` a TPU does not count.
    """
    import torch

    from accel_state.device.device import Device

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    types = (type_ for type_ in DEVICE_KINDS if type_ not in {"xla", "cpu"} and count_devices(type_) > 0)
    type_ = next(types, "cpu")
    return Device(type_).supports(torch.bfloat16)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and not disabled by ``USE_TORCH_XLA``; the flags also check its device.

    Raises:
        AssertionError: both flags are set.
    """
    assert not (check_is_tpu and check_is_gpu), "check_is_tpu and check_is_gpu cannot both be true"
    if "USE_TORCH_XLA" in os.environ and not parse_flag(os.environ, "USE_TORCH_XLA"):
        return False
    if not has_package("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    import importlib

    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in {"GPU", "CUDA"}
