"""Device of this process, and facts about its device type."""

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
    """Facts about a device type; one row of :data:`DEVICE_KINDS`.

    Attributes:
        collective: torch.distributed backend for tensors on the device.
        plugin: module that registers the type with torch; None if torch has it built in.
        visible: environment variable that hides devices from a process.
        family: name of several such devices in Accelerate's ``DistributedType``.
        unsupported: dtypes in which no device of the type computes.
        collective_plugin: module that registers the collective backend.
        together: SPMD: a process drives all devices that it sees, the devices of all processes compute as one, and a
            tensor is a full global array that every process holds alike.
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

# In order of preference; a machine rarely has two of them. XLA is used only on request (see _candidates).
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
    """Free and total bytes of one device."""

    free: int
    total: int


@final
@dataclass(frozen=True, slots=True)
class Device:
    """A device by type and index, with access to torch's functions for it.

    Constructing a Device initialises no driver; only its methods do. ``index`` is None for types that have one device
    (cpu, mps).

    Raises:
        ConfigError: the device type is unknown, or the package that adds it is missing.
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
        """Chooses the device of the process at ``topology``: as requested, or the node's accelerator, or the CPU.

        ``asked``, or ``ACCEL_TORCH_DEVICE`` or ``ACCELERATE_TORCH_DEVICE``, is taken literally ("cuda:3"); without an
        index it means the device of the local rank. ``cpu=True`` or ``ACCELERATE_USE_CPU`` selects the CPU. Otherwise
        local rank *i* gets device *i*. Neither choosing the CPU nor counting CUDA devices creates a CUDA context.
        ``env`` defaults to ``os.environ``.

        Raises:
            TopologyError: the node has more processes than devices.
            ConfigError: the requested device type does not exist, or ``PJRT_DEVICE`` is TPU and torch_xla is missing.
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
        """Parses "cpu", "cuda", "cuda:3", or a ``torch.device``.

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
        """Row of :data:`DEVICE_KINDS` for this device's type."""
        return DEVICE_KINDS[self.type]

    @property
    def torch(self) -> TorchDevice:
        """This device as a ``torch.device``."""
        if self.type == "xla":
            return _xla_device()
        if self.kind.plugin is not None:
            _load(self.kind.plugin, for_type=self.type)
        return torch.device(self.type) if self.index is None else torch.device(self.type, self.index)

    @property
    def collective_backend(self) -> str:
        """Backend for torch.distributed; "cpu:gloo,cuda:nccl" or the like if host tensors need another backend."""
        own = self.kind.collective
        return own if own == "gloo" else f"cpu:gloo,{self.type}:{own}"

    @property
    def own_numbers(self) -> TorchDevice:
        """Device for per-process values that a collective sends: this device, or the CPU on SPMD devices."""
        return torch.device("cpu") if self.kind.together else self.torch

    def supports(self, dtype: Dtype) -> bool:
        """Whether the device computes in ``dtype``, rather than only storing it.

        bfloat16 and float8 depend on the generation: on NVIDIA GPUs bfloat16 needs compute capability 8.0, float8 8.9.
        A CPU computes in float16 and bfloat16 (slowly without the instructions), but not in float8.
        """
        if dtype in self.kind.unsupported:
            return False
        rule = _DTYPE_RULES.get(self.type)
        return rule(self, dtype) if rule else True

    def memory(self) -> DeviceMemory:
        """Returns free and total bytes of the device; of host memory for the CPU and types without a memory query.

        Raises:
            ConfigError: neither the device nor the operating system reports its memory.
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
        """Waits until all work queued on the device is done; returns at once on the CPU."""
        if self.type == "xla":
            import_module("torch_xla").sync(wait=True)
        elif self.type == "mps":
            self._module().synchronize()
        elif self.type != "cpu":
            self._module().synchronize(self.index)

    def empty_cache(self) -> None:
        """Returns unused memory of torch's caching allocator to the device, if the type has such a cache."""
        module = self._module()
        if self.type != "cpu" and hasattr(module, "empty_cache"):
            module.empty_cache()

    def set_current(self) -> None:
        """Makes this the current device of torch; does nothing for the CPU and for types with a single device."""
        if self.index is not None and self.type != "xla":
            self._module().set_device(self.index)

    def load_collectives(self) -> None:
        """Imports the module that registers this type's backend with torch.distributed, if torch lacks the backend.

        Raises:
            ConfigError: the package of that module is missing.
        """
        for plugin in (self.kind.plugin, self.kind.collective_plugin):
            if plugin is not None:
                _load(plugin, for_type=self.type)

    def rng_state(self) -> Tensor:
        """Returns the state of the device's generator: a uint8 vector; on XLA one 64-bit seed as int64."""
        if self.type == "cpu":
            return torch.get_rng_state()
        if self.type == "xla":
            seed = int(import_module("torch_xla.core.xla_model").get_rng_state())
            return torch.tensor([seed - (seed >> 63 << 64)], dtype=torch.int64)  # the same 64 bits, signed
        module = self._module()
        state = module.get_rng_state() if self.index is None else module.get_rng_state(self.index)
        return torch.as_tensor(state)

    def set_rng_state(self, state: Tensor) -> None:
        """Restores a state that :meth:`rng_state` returned on a device of the same type."""
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
    """Whether a tensor is on SPMD devices (XLA), where every process holds the full tensor and nothing is gathered."""
    kind = DEVICE_KINDS.get(tensor.device.type)
    return kind is not None and kind.together


def count_devices(type_: str) -> int:
    """Returns the number of visible devices of this type; 0 if their driver or torch plugin is missing.

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
    """Yields the accelerator types that this process sees, without importing a plugin that is not installed.

    torch_xla may be installed for other reasons, so XLA counts only if ``PJRT_DEVICE`` requests it. If ``PJRT_DEVICE``
    is TPU and torch_xla is missing, a ConfigError is raised instead of falling back to another device.
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
    # A scheduler may bind each task to its own device: every process then sees one device, as number 0.
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
