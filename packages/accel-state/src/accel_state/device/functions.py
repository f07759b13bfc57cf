"""Functions of device types: those of ``torch.<type>``, and those of the types that differ."""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch import device as TorchDevice
from torch import dtype as Dtype

from accel_state.errors import ConfigError, SessionError

if TYPE_CHECKING:
    from accel_state.device.kinds import DeviceKind

FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_FNUZ = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


class DeviceMemory(NamedTuple):
    """Free and total bytes of one device."""

    free: int
    total: int


class DeviceFunctions:
    """Functions of a device type as ``torch.<type>`` has them; a type that differs overrides them.

    ``index`` is that of one device, None for types with a single device. Nothing is imported and no driver is
    initialised before a function is called.
    """

    @property
    def indexed(self) -> bool:
        """Whether the devices of the type have indices. Default: yes."""
        return True

    def module(self, kind: "DeviceKind") -> Any:
        """Imports torch's module of the type, and the package that adds the type to torch.

        Raises:
            ConfigError: the package is missing, or did not add the type.
        """
        if kind.plugin is not None:
            _load_installed(kind.plugin, for_type=kind.type)
        module = getattr(torch, kind.type, None)
        if module is None:
            raise ConfigError(f"{kind.plugin} did not add torch.{kind.type}; is its version made for this torch?")
        return module

    def device(self, kind: "DeviceKind", index: int | None) -> TorchDevice:
        """Returns the device as torch names it."""
        if kind.plugin is not None:
            load(kind.plugin, for_type=kind.type)
        return torch.device(kind.type) if index is None else torch.device(kind.type, index)

    def count(self, kind: "DeviceKind") -> int:
        """Returns the number of visible devices; raises ConfigError without the package that adds the type."""
        return int(self.module(kind).device_count())

    def is_present(self, kind: "DeviceKind", env: Mapping[str, str]) -> bool:
        """Whether a process without a requested device may get one of this type. Default: if one is visible."""
        try:
            return self.count(kind) > 0
        except ConfigError:
            return False

    def supports(self, kind: "DeviceKind", index: int | None, dtype: Dtype) -> bool:
        """Whether the device computes in a dtype that the type does not rule out. Default: yes."""
        return True

    def memory(self, kind: "DeviceKind", index: int | None) -> DeviceMemory:
        """Returns free and total bytes. Default: of the device, or of host memory if the type has no query."""
        module = self.module(kind)
        if not hasattr(module, "mem_get_info"):
            return host_memory()
        free, total = module.mem_get_info(index)
        return DeviceMemory(int(free), int(total))

    def product_name(self, kind: "DeviceKind", index: int | None) -> str:
        """Returns the vendor's name of the device; empty for types that do not tell. Initialises the driver."""
        name = getattr(self.module(kind), "get_device_name", None)
        return "" if name is None else str(name() if index is None else name(index))

    def memory_summary(self, kind: "DeviceKind", index: int | None) -> str:
        """Returns a table of torch's caching allocator; empty for types that have none."""
        summary = getattr(self.module(kind), "memory_summary", None)
        return "" if summary is None else str(summary() if index is None else summary(index))

    def synchronize(self, kind: "DeviceKind", index: int | None) -> None:
        """Waits until all work queued on the device is done."""
        self.module(kind).synchronize(index)

    def empty_cache(self, kind: "DeviceKind") -> None:
        """Returns unused memory of torch's caching allocator to the device, if the type has such a cache."""
        module = self.module(kind)
        if hasattr(module, "empty_cache"):
            module.empty_cache()

    def empty_used_cache(self, kind: "DeviceKind") -> None:
        """Empties the cache of a type that this process has used already, and imports nothing otherwise."""
        module: Any = getattr(torch, kind.type, None)
        if not hasattr(module, "empty_cache"):
            return
        if module.is_initialized() if hasattr(module, "is_initialized") else module.device_count() > 0:
            module.empty_cache()

    def set_current(self, kind: "DeviceKind", index: int | None) -> None:
        """Makes a device the current one of torch. Default: if it has an index."""
        if index is not None:
            self.module(kind).set_device(index)

    def barrier_devices(self, index: int | None) -> list[int] | None:
        """Returns the indices of the devices that a barrier runs on. Default: None, the group's own choice."""
        return None

    def check_connections(self, index: int | None, env: Mapping[str, str]) -> None:
        """Raises SessionError if collectives between devices of this node would fail or hang. Default: does nothing."""

    def keep_to_near_cores(self, index: int | None) -> bool:
        """Binds this process to the CPU cores next to the device. Default: returns False, no core is nearer."""
        return False

    def seed(self, seed: int) -> None:
        """Seeds generators that ``torch.manual_seed`` does not seed. Default: there are none."""

    def rng_state(self, kind: "DeviceKind", index: int | None) -> Tensor:
        """Returns the state of the device's generator. Default: a uint8 vector."""
        module = self.module(kind)
        return torch.as_tensor(module.get_rng_state() if index is None else module.get_rng_state(index))

    def set_rng_state(self, kind: "DeviceKind", index: int | None, state: Tensor) -> None:
        """Restores a state that ``rng_state`` returned."""
        module = self.module(kind)
        if index is None:
            module.set_rng_state(state.cpu())
        else:
            module.set_rng_state(state.cpu(), index)


@final
class CPUFunctions(DeviceFunctions):
    """The CPU: one device, whose memory is the host's and whose work is done when a call returns."""

    @property
    def indexed(self) -> bool:
        """Whether the devices have indices: no."""
        return False

    def count(self, kind: "DeviceKind") -> int:
        """Returns 1."""
        return 1

    def is_present(self, kind: "DeviceKind", env: Mapping[str, str]) -> bool:
        """Whether the CPU is chosen like an accelerator: no, it is what remains."""
        return False

    def memory(self, kind: "DeviceKind", index: int | None) -> DeviceMemory:
        """Returns free and total bytes of host memory."""
        return host_memory()

    def product_name(self, kind: "DeviceKind", index: int | None) -> str:
        """Returns an empty name: nothing is looked up by a processor's."""
        return ""

    def memory_summary(self, kind: "DeviceKind", index: int | None) -> str:
        """Returns an empty summary: there is no cache."""
        return ""

    def synchronize(self, kind: "DeviceKind", index: int | None) -> None:
        """Returns at once."""

    def empty_cache(self, kind: "DeviceKind") -> None:
        """Does nothing: there is no cache."""

    def empty_used_cache(self, kind: "DeviceKind") -> None:
        """Does nothing: there is no cache."""

    def set_current(self, kind: "DeviceKind", index: int | None) -> None:
        """Does nothing: there is one device."""

    def rng_state(self, kind: "DeviceKind", index: int | None) -> Tensor:
        """Returns the state of torch's CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, kind: "DeviceKind", index: int | None, state: Tensor) -> None:
        """Restores the state of torch's CPU generator."""
        torch.set_rng_state(state.cpu())


@final
class CUDAFunctions(DeviceFunctions):
    """NVIDIA's and AMD's GPUs."""

    def supports(self, kind: "DeviceKind", index: int | None, dtype: Dtype) -> bool:
        """Whether the generation of the GPU has instructions of the dtype."""
        device = self.device(kind, index)
        if torch.version.hip is not None:
            arch = torch.cuda.get_device_properties(device).gcnArchName
            if dtype in _FNUZ:
                return bool(arch.startswith("gfx94"))
            return dtype not in FP8 or bool(arch.startswith(("gfx95", "gfx12")))
        if dtype in _FNUZ:
            return False
        needed = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}.get(dtype, (8, 9) if dtype in FP8 else (0, 0))
        return torch.cuda.get_device_capability(device) >= needed

    def barrier_devices(self, index: int | None) -> list[int] | None:
        """Returns the GPU of this process, because NCCL otherwise guesses it from the rank."""
        return None if index is None else [index]

    def check_connections(self, index: int | None, env: Mapping[str, str]) -> None:
        """Checks the driver of GPUs of the RTX 40 series, which older ones do not let talk to each other directly.

        Raises:
            SessionError: NCCL would fail or hang on these GPUs with this driver.
        """
        detours = env.get("NCCL_P2P_DISABLE") and env.get("NCCL_IB_DISABLE")
        if detours or "RTX 40" not in torch.cuda.get_device_name(index):
            return
        from accel_state.device.gpus import check_cuda_p2p_ib_support

        if not check_cuda_p2p_ib_support():
            raise SessionError(
                "GPUs of the RTX 40 series cannot talk to each other directly under this driver; set NCCL_P2P_DISABLE=1"
                " and NCCL_IB_DISABLE=1, or install driver 550.40.07 or newer"
            )

    def keep_to_near_cores(self, index: int | None) -> bool:
        """Binds this process to the cores next to its GPU, if Linux lists them."""
        from accel_state.device.gpus import set_numa_affinity

        set_numa_affinity(torch.cuda.current_device() if index is None else index)
        return True


@final
class MPSFunctions(DeviceFunctions):
    """Apple's GPU: one device."""

    @property
    def indexed(self) -> bool:
        """Whether the devices have indices: no."""
        return False

    def supports(self, kind: "DeviceKind", index: int | None, dtype: Dtype) -> bool:
        """Whether this version of macOS has bfloat16."""
        return dtype != torch.bfloat16 or torch.backends.mps.is_macos_or_newer(14, 0)

    def memory(self, kind: "DeviceKind", index: int | None) -> DeviceMemory:
        """Returns free and total bytes of the memory that the system recommends to use."""
        module = self.module(kind)
        total = int(module.recommended_max_memory())
        return DeviceMemory(total - int(module.driver_allocated_memory()), total)

    def synchronize(self, kind: "DeviceKind", index: int | None) -> None:
        """Waits until all queued work is done."""
        self.module(kind).synchronize()


class VendorFunctions(DeviceFunctions):
    """Types whose package says whether the device computes in bfloat16."""

    def supports(self, kind: "DeviceKind", index: int | None, dtype: Dtype) -> bool:
        """Whether the device computes in the dtype, as the package says."""
        ask = getattr(self.module(kind), "is_bf16_supported", None)
        return bool(ask()) if dtype == torch.bfloat16 and ask is not None else True


@final
class HPUFunctions(DeviceFunctions):
    """Intel's Gaudi."""

    def empty_used_cache(self, kind: "DeviceKind") -> None:
        """Does nothing: the graph compiler owns the memory."""


@final
class XLAFunctions(DeviceFunctions):
    """Devices of torch_xla, which one process drives together, and whose computations are recorded."""

    @property
    def indexed(self) -> bool:
        """Whether the devices have indices: no, they compute as one."""
        return False

    def module(self, kind: "DeviceKind") -> Any:
        """Imports torch_xla."""
        _load_installed("torch_xla", for_type=kind.type)
        return import_module("torch_xla")

    def device(self, kind: "DeviceKind", index: int | None) -> TorchDevice:
        """Returns the device that stands for all."""
        load("torch_xla", for_type=kind.type)
        found: TorchDevice = import_module("torch_xla").device()
        return found

    def count(self, kind: "DeviceKind") -> int:
        """Returns the number of devices of all processes."""
        self.module(kind)
        return int(import_module("torch_xla.runtime").global_runtime_device_count())

    def is_present(self, kind: "DeviceKind", env: Mapping[str, str]) -> bool:
        """Whether ``PJRT_DEVICE`` requests XLA, because torch_xla may be installed for other reasons.

        Raises:
            ConfigError: ``PJRT_DEVICE`` is TPU and torch_xla is missing, without which the run would be on the CPU.
        """
        if not env.get("PJRT_DEVICE"):
            return False
        if not is_installed("torch_xla") and env["PJRT_DEVICE"].upper() == "TPU":
            raise ConfigError(
                "PJRT_DEVICE is TPU, but torch_xla is not installed, without which this run would be on the CPU; "
                "install the one made for this torch, or unset PJRT_DEVICE (or ask for the CPU: cpu=True)"
            )
        return is_installed("torch_xla")

    def supports(self, kind: "DeviceKind", index: int | None, dtype: Dtype) -> bool:
        """Whether the device computes in the dtype; a TPU has no float16."""
        return dtype != torch.float16 or import_module("torch_xla.runtime").device_type() != "TPU"

    def memory(self, kind: "DeviceKind", index: int | None) -> DeviceMemory:
        """Returns free and total bytes of host memory; the devices have no joint query."""
        self.module(kind)
        return host_memory()

    def synchronize(self, kind: "DeviceKind", index: int | None) -> None:
        """Runs what is recorded, and waits for it."""
        import_module("torch_xla").sync(wait=True)

    def empty_used_cache(self, kind: "DeviceKind") -> None:
        """Does nothing: the runtime owns the memory."""

    def set_current(self, kind: "DeviceKind", index: int | None) -> None:
        """Does nothing: the devices compute as one."""

    def seed(self, seed: int) -> None:
        """Seeds the generator that all devices draw from, if torch_xla is imported."""
        import sys

        if "torch_xla.core.xla_model" in sys.modules:
            sys.modules["torch_xla.core.xla_model"].set_rng_state(seed)

    def rng_state(self, kind: "DeviceKind", index: int | None) -> Tensor:
        """Returns the generator's 64-bit seed as int64."""
        seed = int(import_module("torch_xla.core.xla_model").get_rng_state())
        return torch.tensor([seed - (seed >> 63 << 64)], dtype=torch.int64, device="cpu")  # the same 64 bits, signed

    def set_rng_state(self, kind: "DeviceKind", index: int | None, state: Tensor) -> None:
        """Restores the generator's seed."""
        import_module("torch_xla.core.xla_model").set_rng_state(int(state.item()) % (1 << 64))


def is_installed(module: str) -> bool:
    """Whether the package of a module is installed; imports nothing."""
    return find_spec(module.partition(".")[0]) is not None


def load(plugin: str, *, for_type: str) -> None:
    """Imports the module that adds a device type or its collectives to torch.

    Raises:
        ConfigError: the import fails.
    """
    try:
        import_module(plugin)
    except ImportError as error:
        raise ConfigError(f"device type {for_type!r} needs the package {plugin!r}: {error}") from error


def _load_installed(plugin: str, *, for_type: str) -> None:
    """Imports a module as ``load`` does; a package that is not installed is told apart from one that fails."""
    if not is_installed(plugin):
        raise ConfigError(f"device type {for_type!r} needs the package {plugin!r}, which is not installed")
    load(plugin, for_type=for_type)


def host_memory() -> DeviceMemory:
    """Returns free and total bytes of host memory.

    Raises:
        ConfigError: the operating system does not tell.
    """
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError("the operating system does not tell how much memory there is") from error
