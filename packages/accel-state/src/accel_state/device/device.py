"""Device of this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import device as TorchDevice
from torch import dtype as Dtype

from accel_state.device.functions import DeviceMemory, load
from accel_state.device.kinds import DEVICE_KINDS, DeviceKind
from accel_state.environment import parse_flag
from accel_state.errors import ConfigError, TopologyError
from accel_state.topology import Topology


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
            if device.index is None and device.kind.functions.indexed:
                bound = _is_bound(topology, device.kind, count=count_devices(device.type), env=env)
                return cls(device.type, 0 if bound else topology.local_rank)
            return device
        if cpu or parse_flag(env, "ACCELERATE_USE_CPU") or parse_flag(env, "ACCEL_USE_CPU"):
            return cls("cpu")
        kind = next((kind for kind in DEVICE_KINDS.values() if kind.functions.is_present(kind, env)), None)
        if kind is None:
            return cls("cpu")
        if not kind.functions.indexed:
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
        """Row of ``DEVICE_KINDS`` for this device's type."""
        return DEVICE_KINDS[self.type]

    @property
    def torch(self) -> TorchDevice:
        """This device as a ``torch.device``."""
        kind = self.kind
        return kind.functions.device(kind, self.index)

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
        kind = self.kind
        return kind.functions.supports(kind, self.index, dtype)

    def memory(self) -> DeviceMemory:
        """Returns free and total bytes of the device; of host memory for the CPU and types without a memory query.

        Raises:
            ConfigError: neither the device nor the operating system reports its memory.
        """
        kind = self.kind
        return kind.functions.memory(kind, self.index)

    def product_name(self) -> str:
        """Returns the vendor's name, such as "NVIDIA H100 80GB HBM3"; empty for types that do not tell.

        Initialises the driver.
        """
        kind = self.kind
        return kind.functions.product_name(kind, self.index)

    def memory_summary(self) -> str:
        """Returns a table of torch's caching allocator for the device; empty for types that have none."""
        kind = self.kind
        return kind.functions.memory_summary(kind, self.index)

    def synchronize(self) -> None:
        """Waits until all work queued on the device is done; returns at once on the CPU."""
        kind = self.kind
        kind.functions.synchronize(kind, self.index)

    def empty_cache(self) -> None:
        """Returns unused memory of torch's caching allocator to the device, if the type has such a cache."""
        kind = self.kind
        kind.functions.empty_cache(kind)

    def set_current(self) -> None:
        """Makes this the current device of torch; does nothing for the CPU and for types with a single device."""
        kind = self.kind
        kind.functions.set_current(kind, self.index)

    @property
    def barrier_devices(self) -> list[int] | None:
        """Indices of the devices that a barrier of this process runs on; None: the group's own choice."""
        return self.kind.functions.barrier_devices(self.index)

    def check_connections(self, env: Mapping[str, str]) -> None:
        """Checks that the devices of this node can reach each other, where a type has known exceptions.

        Raises:
            SessionError: collectives would fail or hang.
        """
        self.kind.functions.check_connections(self.index, env)

    def keep_to_near_cores(self) -> bool:
        """Binds this process to the CPU cores next to the device; False, and nothing done, if no core is nearer."""
        return self.kind.functions.keep_to_near_cores(self.index)

    def load_collectives(self) -> None:
        """Imports the module that registers this type's backend with torch.distributed, if torch lacks the backend.

        Raises:
            ConfigError: the package of that module is missing.
        """
        for plugin in (self.kind.plugin, self.kind.collective_plugin):
            if plugin is not None:
                load(plugin, for_type=self.type)

    def rng_state(self) -> Tensor:
        """Returns the state of the device's generator: a uint8 vector; on XLA one 64-bit seed as int64."""
        kind = self.kind
        return kind.functions.rng_state(kind, self.index)

    def set_rng_state(self, state: Tensor) -> None:
        """Restores a state that ``rng_state`` returned on a device of the same type."""
        kind = self.kind
        kind.functions.set_rng_state(kind, self.index, state)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def is_full(tensor: Tensor) -> bool:
    """Whether a tensor is on SPMD devices (XLA), where every process holds the full tensor and nothing is gathered."""
    kind = DEVICE_KINDS.get(tensor.device.type)
    return kind is not None and kind.together


def count_devices(type_: str) -> int:
    """Returns the number of visible devices of this type; 0 if their driver or torch plugin is missing.

    Raises:
        ConfigError: ``type_`` is not in ``DEVICE_KINDS``.
    """
    if type_ not in DEVICE_KINDS:
        raise ConfigError(f"unknown device type {type_!r}; known: {', '.join(DEVICE_KINDS)}")
    kind = DEVICE_KINDS[type_]
    try:
        return kind.functions.count(kind)
    except ConfigError:
        return 0


def _index_for(topology: Topology, kind: DeviceKind, *, count: int, env: Mapping[str, str]) -> int:
    if topology.local_rank < count and topology.local_world_size <= count:
        return topology.local_rank
    if _is_bound(topology, kind, count=count, env=env):
        return 0
    raise TopologyError(
        f"{topology.local_world_size} processes on this node but {count} {kind.type} device(s); start at most {count} "
        f"per node, or use the CPU (cpu=True or ACCELERATE_USE_CPU=true)"
    )


def _is_bound(topology: Topology, kind: DeviceKind, *, count: int, env: Mapping[str, str]) -> bool:
    """Whether a scheduler has bound each task to a device of its own, which the task sees as number 0."""
    by_scheduler = topology.launcher not in {"torchrun", "accel launch", "single"}
    return count == 1 and by_scheduler and any(env.get(name) for name in kind.visible)
