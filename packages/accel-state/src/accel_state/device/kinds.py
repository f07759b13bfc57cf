"""Table of device types: facts, and the functions of each type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from accel_state.device.functions import (
    FP8,
    CPUFunctions,
    CUDAFunctions,
    DeviceFunctions,
    HPUFunctions,
    MPSFunctions,
    VendorFunctions,
    XLAFunctions,
)

_TORCH, _VENDOR = DeviceFunctions(), VendorFunctions()
_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # the last is Slurm's for AMD's GPUs


@final
@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Facts about a device type; one row of ``DEVICE_KINDS``.

    Attributes:
        collective: torch.distributed backend for tensors on the device.
        plugin: module that registers the type with torch; None if torch has it built in.
        visible: environment variables that hide devices from a process.
        family: name of several such devices in Accelerate's ``DistributedType``.
        unsupported: dtypes in which no device of the type computes.
        collective_plugin: module that registers the collective backend.
        together: SPMD: a process drives all devices that it sees, the devices of all processes compute as one, and a
            tensor is a full global array that every process holds alike.
        bound: collectives are bound to the device when the process group is opened, and report its errors there.
        functions: memory, random numbers, synchronisation and so on.
    """

    type: str
    collective: str
    plugin: str | None = None
    visible: tuple[str, ...] = ()
    family: str = "NO"
    unsupported: frozenset[torch.dtype] = frozenset()
    collective_plugin: str | None = None
    together: bool = False
    bound: bool = False
    functions: DeviceFunctions = _TORCH


# In order of preference; a machine rarely has two of them.
DEVICE_KINDS: Mapping[str, DeviceKind] = {
    kind.type: kind
    for kind in (
        DeviceKind("mps", "gloo", None, (), "NO", FP8 | {torch.float64, torch.complex128}, functions=MPSFunctions()),
        DeviceKind("mlu", "cncl", "torch_mlu", ("MLU_VISIBLE_DEVICES",), "MULTI_MLU", FP8, functions=_VENDOR),
        DeviceKind("sdaa", "tccl", "torch_sdaa", ("SDAA_VISIBLE_DEVICES",), "MULTI_SDAA", FP8),
        DeviceKind("musa", "mccl", "torch_musa", ("MUSA_VISIBLE_DEVICES",), "MULTI_MUSA", FP8, functions=_VENDOR),
        DeviceKind("npu", "hccl", "torch_npu", ("ASCEND_RT_VISIBLE_DEVICES",), "MULTI_NPU", FP8, functions=_VENDOR),
        DeviceKind(
            "hpu",
            "hccl",
            "habana_frameworks.torch",
            ("HABANA_VISIBLE_MODULES",),
            "MULTI_HPU",
            FP8,
            "habana_frameworks.torch.distributed.hccl",
            functions=HPUFunctions(),
        ),
        DeviceKind("cuda", "nccl", None, _GPUS, "MULTI_GPU", bound=True, functions=CUDAFunctions()),
        DeviceKind("xpu", "xccl", None, ("ZE_AFFINITY_MASK",), "MULTI_XPU", FP8, bound=True, functions=_VENDOR),
        DeviceKind("neuron", "neuron", "torch_neuronx", ("NEURON_RT_VISIBLE_CORES",), "MULTI_NEURON", FP8),
        DeviceKind(
            "xla",
            "gloo",
            "torch_xla",
            (),
            "XLA",
            FP8 | {torch.complex128},
            together=True,
            functions=XLAFunctions(),
        ),
        DeviceKind("cpu", "gloo", None, (), "MULTI_CPU", FP8, functions=CPUFunctions()),
    )
}
