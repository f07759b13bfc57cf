"""The device that this process computes on, and facts about devices of its type."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch import device as TorchDevice
from torch import dtype as Dtype

from accel_state.environment import parse_flag
from accel_state.errors import ConfigError, TopologyError
from accel_state.topology import Topology


@final
@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What is true of every device of one type. One row of :data:`DEVICE_KINDS`.

    ``collective`` is torch.distributed's backend for tensors on it, ``plugin`` the module that teaches torch the type
    (None when torch knows it), ``visible`` the variable that hides devices from a process, ``family`` the name that
    Accelerate's ``DistributedType`` has for several of them, ``unsupported`` dtypes that no device of the type
    computes, ``collective_plugin`` the module that adds the backend; ``together``: one process drives all that it sees,
    the devices of all processes compute as one, and a tensor there is the whole, which every process has alike.
    """

    type: str
    collective: str
    plugin: str | None = None
    visible: str | None = None
    family: str = "NO"
    unsupported: frozenset[torch.dtype] = frozenset()
    collective_plugin: str | None = None
    together: bool = False


_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

# In order of preference; a machine rarely has two of them. XLA is asked for, never found (see _candidates).
DEVICE_KINDS: Mapping[str, DeviceKind] = {
    kind.type: kind
    for kind in (
        DeviceKind("mps", "gloo", None, None, "NO", _FP8 | {torch.float64, torch.complex128}),
        DeviceKind("mlu", "cncl", "torch_mlu", "MLU_VISIBLE_DEVICES", "MULTI_MLU", _FP8),
        DeviceKind("sdaa", "tccl", "torch_sdaa", "SDAA_VISIBLE_DEVICES", "MULTI_SDAA", _FP8),
        DeviceKind("musa", "mccl", "torch_musa", "MUSA_VISIBLE_DEVICES", "MULTI_MUSA", _FP8),
        DeviceKind("npu", "hccl", "torch_npu", "ASCEND_RT_VISIBLE_DEVICES", "MULTI_NPU", _FP8),
        DeviceKind(
            "hpu",
            "hccl",
            "habana_frameworks.torch",
            "HABANA_VISIBLE_MODULES",
            "MULTI_HPU",
            _FP8,
            "habana_frameworks.torch.distributed.hccl",
        ),
        DeviceKind("cuda", "nccl", None, "CUDA_VISIBLE_DEVICES", "MULTI_GPU"),
        DeviceKind("xpu", "xccl", None, "ZE_AFFINITY_MASK", "MULTI_XPU", _FP8),
        DeviceKind("neuron", "neuron", "torch_neuronx", "NEURON_RT_VISIBLE_CORES", "MULTI_NEURON", _FP8),
        DeviceKind("xla", "gloo", "torch_xla", None, "XLA", _FP8 | {torch.complex128}, together=True),
        DeviceKind("cpu", "gloo", None, None, "MULTI_CPU", _FP8),
    )
}


class DeviceMemory(NamedTuple):
    """Bytes of one device: free now, and in all."""

    free: int
    total: int


@final
@dataclass(frozen=True, slots=True)
class Device:
    """One device, by type and index, and how to reach what torch knows of it.

    Making one touches no driver; only the methods do. ``index`` is None for types that have one device (cpu, mps).

    Raises:
        ConfigError: torch has no such device type, or the package that adds it is missing.
    """

    type: str
    index: int | None = None

    def __post_init__(self) -> None:
        if self.type not in DEVICE_KINDS:
            raise ConfigError(f"unknown device type {self.type!r}; known: {', '.join(DEVICE_KINDS)}")

    @classmethod
    def choose(
        cls,
        topology: Topology,
        *,
        cpu: bool = False,
        asked: "str | TorchDevice | Device | None" = None,
        env: Mapping[str, str] | None = None,
    ) -> "Device":
        """The device of the process at ``topology``: asked for, else the machine's accelerator, else the CPU.

        ``asked``, else ``ACCEL_TORCH_DEVICE`` or ``ACCELERATE_TORCH_DEVICE``, is taken literally ("cuda:3"); without an
        index it means process *i*'s device *i*. ``cpu=True`` or ``ACCELERATE_USE_CPU`` keeps to the CPU. Otherwise
        process *i* of a node gets device *i*. Neither choosing the CPU nor counting CUDA devices makes a CUDA context.
        ``env`` defaults to ``os.environ``.

        Raises:
            TopologyError: the node has more processes than devices.
            ConfigError: the device asked for by name does not exist for torch; or a TPU whose library is missing.
        """
        env = os.environ if env is None else env
        asked = asked or env.get("ACCEL_TORCH_DEVICE") or env.get("ACCELERATE_TORCH_DEVICE")
        if asked:
            device = cls.parse(asked)
            if device.index is None and _has_indices(device.type):
                return cls(device.type, topology.local_rank)
            return device
        if cpu or parse_flag(env, "ACCELERATE_USE_CPU") or parse_flag(env, "ACCEL_USE_CPU"):
            return cls("cpu")
        kind = next(_candidates(env), None)
        if kind is None:
            return cls("cpu")
        if not _has_indices(kind.type):
            return cls(kind.type)
        return cls(kind.type, _index_for(topology, kind, count=count_devices(kind.type), env=env))

    @classmethod
    def parse(cls, text: "str | TorchDevice | Device") -> "Device":
        """The device that ``text`` names: "cpu", "cuda", "cuda:3", or a ``torch.device``.

        Raises:
            ConfigError: ``text`` is not a device type of the table, optionally with an index.
        """
        if isinstance(text, Device):
            return text
        type_, _, index = str(text).partition(":")
        if index and not index.isdecimal():
            raise ConfigError(f"cannot read the device {str(text)!r}; expected like 'cpu' or 'cuda:0'")
        return cls(type_.lower(), int(index) if index and type_ != "cpu" else None)

    @property
    def kind(self) -> DeviceKind:
        """The row of facts of this device's type."""
        return DEVICE_KINDS[self.type]

    @property
    def torch(self) -> TorchDevice:
        """The same device in torch's own type."""
        if self.type == "xla":
            return _xla_device()
        if self.kind.plugin is not None:
            _load(self.kind.plugin, for_type=self.type)
        return torch.device(self.type) if self.index is None else torch.device(self.type, self.index)

    @property
    def collective_backend(self) -> str:
        """What torch.distributed should use: both halves where host tensors need another backend than device ones."""
        own = self.kind.collective
        return own if own == "gloo" else f"cpu:gloo,{self.type}:{own}"

    @property
    def own_numbers(self) -> TorchDevice:
        """Where a process puts numbers of its own that the others are to get: here, if there it has any of its own."""
        return torch.device("cpu") if self.kind.together else self.torch

    def supports(self, dtype: Dtype) -> bool:
        """Whether the device computes in ``dtype`` itself, rather than only storing it.

        bfloat16 and float8 depend on the generation: bfloat16 needs compute capability 8.0 on NVIDIA GPUs, float8
        8.9. A CPU computes float16 and bfloat16 (slowly without the instructions), float8 not at all.
        """
        if dtype in self.kind.unsupported:
            return False
        rule = _DTYPE_RULES.get(self.type)
        return rule(self, dtype) if rule else True

    def memory(self) -> DeviceMemory:
        """Free and total bytes of the device; of the machine's RAM for the CPU and types that do not tell.

        Raises:
            ConfigError: neither the device nor the operating system tells.
        """
        module = self._module()
        if self.type == "mps":
            total = int(module.recommended_max_memory())
            return DeviceMemory(total - int(module.driver_allocated_memory()), total)
        if self.type != "cpu" and hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(self.index)
            return DeviceMemory(int(free), int(total))
        return _host_memory()

    def synchronize(self) -> None:
        """Waits until everything queued on the device is done; at once on the CPU."""
        if self.type == "xla":
            import_module("torch_xla").sync(wait=True)
        elif self.type == "mps":
            self._module().synchronize()
        elif self.type != "cpu":
            self._module().synchronize(self.index)

    def empty_cache(self) -> None:
        """Gives memory that torch caches but does not use back to the device, where the type has such a cache."""
        module = self._module()
        if self.type != "cpu" and hasattr(module, "empty_cache"):
            module.empty_cache()

    def set_current(self) -> None:
        """Makes this the device that torch uses when none is named; the CPU and single devices need nothing."""
        if self.index is not None and self.type != "xla":
            self._module().set_device(self.index)

    def load_collectives(self) -> None:
        """Imports what adds this type's backend to torch.distributed; nothing where torch has it.

        Raises:
            ConfigError: the package that adds it is missing.
        """
        for plugin in (self.kind.plugin, self.kind.collective_plugin):
            if plugin is not None:
                _load(plugin, for_type=self.type)

    def rng_state(self) -> Tensor:
        """The device generator's state: a uint8 vector on the CPU; on XLA one seed of 64 bits, as int64."""
        if self.type == "cpu":
            return torch.get_rng_state()
        if self.type == "xla":
            seed = int(import_module("torch_xla.core.xla_model").get_rng_state())
            return torch.tensor([seed - (seed >> 63 << 64)], dtype=torch.int64)  # the same 64 bits, signed
        module = self._module()
        state = module.get_rng_state() if self.index is None else module.get_rng_state(self.index)
        return torch.as_tensor(state)

    def set_rng_state(self, state: Tensor) -> None:
        """Restores what :meth:`rng_state` gave on a device of the same type."""
        if self.type == "cpu":
            torch.set_rng_state(state.cpu())
        elif self.type == "xla":
            import_module("torch_xla.core.xla_model").set_rng_state(int(state.item()) % (1 << 64))
        elif self.index is None:
            self._module().set_rng_state(state.cpu())
        else:
            self._module().set_rng_state(state.cpu(), self.index)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def _module(self) -> Any:
        return _device_module(self.kind)


def is_full(tensor: Tensor) -> bool:
    """Whether a tensor is on devices that compute as one (XLA), so that no process has a part for others to gather."""
    kind = DEVICE_KINDS.get(tensor.device.type)
    return kind is not None and kind.together


def count_devices(type_: str) -> int:
    """How many devices of this type the process sees; 0 when their driver or torch plugin is missing.

    Raises:
        ConfigError: ``type_`` is not in :data:`DEVICE_KINDS`.
    """
    if type_ not in DEVICE_KINDS:
        raise ConfigError(f"unknown device type {type_!r}; known: {', '.join(DEVICE_KINDS)}")
    if type_ == "cpu":
        return 1
    try:
        module = _device_module(DEVICE_KINDS[type_])
    except ConfigError:
        return 0
    if type_ == "xla":
        return int(import_module("torch_xla.runtime").global_runtime_device_count())
    return int(module.device_count())


def _candidates(env: Mapping[str, str]) -> Iterator[DeviceKind]:
    """Kinds of accelerator that this process sees, without importing a plugin that is not installed.

    torch_xla can be present for many reasons, so XLA counts only when ``PJRT_DEVICE`` asks for it. Where that says that
    there is a TPU, nothing else stands in for one.
    """
    for kind in DEVICE_KINDS.values():
        if kind.type == "cpu" or (kind.type == "xla" and not env.get("PJRT_DEVICE")):
            continue
        if kind.type == "xla":
            if _is_installed("torch_xla"):
                yield kind
            elif env["PJRT_DEVICE"].upper() == "TPU":
                raise ConfigError(
                    "PJRT_DEVICE is TPU, but torch_xla is not installed, without which this run would be on the CPU; "
                    "install the one made for this torch, or unset PJRT_DEVICE (or ask for the CPU: cpu=True)"
                )
        elif count_devices(kind.type) > 0:
            yield kind


def _has_indices(type_: str) -> bool:
    return type_ not in {"cpu", "mps", "xla"}


def _index_for(topology: Topology, kind: DeviceKind, *, count: int, env: Mapping[str, str]) -> int:
    if topology.local_rank < count and topology.local_world_size <= count:
        return topology.local_rank
    # A scheduler may bind each task to devices of its own: every process then sees one, as number 0.
    if (
        count == 1
        and topology.launcher not in {"torchrun", "accel launch", "single"}
        and kind.visible
        and env.get(kind.visible)
    ):
        return 0
    raise TopologyError(
        f"{topology.local_world_size} processes on this node but {count} {kind.type} device(s); start at most {count} "
        f"per node, or use the CPU (cpu=True or ACCELERATE_USE_CPU=true)"
    )


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module.partition(".")[0]) is not None


def _load(plugin: str, *, for_type: str) -> None:
    try:
        import_module(plugin)
    except ImportError as error:
        raise ConfigError(f"device type {for_type!r} needs the package {plugin!r}: {error}") from error


def _device_module(kind: DeviceKind) -> Any:
    if kind.plugin is not None:
        if not _is_installed(kind.plugin):
            raise ConfigError(f"device type {kind.type!r} needs the package {kind.plugin!r}, which is not installed")
        _load(kind.plugin, for_type=kind.type)
    module = import_module("torch_xla") if kind.type == "xla" else getattr(torch, kind.type, None)
    if module is None:
        raise ConfigError(f"{kind.plugin} did not add torch.{kind.type}; is its version made for this torch?")
    return module


def _xla_device() -> torch.device:
    _load("torch_xla", for_type="xla")
    device: torch.device = import_module("torch_xla").device()
    return device


def _host_memory() -> DeviceMemory:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError("the operating system does not tell how much memory there is") from error


def _cuda_supports(device: Device, dtype: torch.dtype) -> bool:
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device.torch).gcnArchName
        fnuz = arch.startswith("gfx94")
        if dtype in {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}:
            return fnuz
        return dtype not in _FP8 or arch.startswith(("gfx95", "gfx12"))
    if dtype in {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}:
        return False
    needed = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}.get(dtype, (8, 9) if dtype in _FP8 else (0, 0))
    return torch.cuda.get_device_capability(device.torch) >= needed


def _mps_supports(device: Device, dtype: torch.dtype) -> bool:
    return dtype != torch.bfloat16 or torch.backends.mps.is_macos_or_newer(14, 0)


def _vendor_supports(device: Device, dtype: torch.dtype) -> bool:
    ask = getattr(device._module(), "is_bf16_supported", None)
    return bool(ask()) if dtype == torch.bfloat16 and ask is not None else True


def _xla_supports(device: Device, dtype: torch.dtype) -> bool:
    return dtype != torch.float16 or import_module("torch_xla.runtime").device_type() != "TPU"


_DTYPE_RULES: Mapping[str, Callable[[Device, torch.dtype], bool]] = {
    "cuda": _cuda_supports,
    "mps": _mps_supports,
    "xpu": _vendor_supports,
    "npu": _vendor_supports,
    "mlu": _vendor_supports,
    "musa": _vendor_supports,
    "xla": _xla_supports,
}
