"""Hardware that a strategy is planned for: number, memory and speed of devices and links."""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, final

from accel_state.device.products import PRODUCTS, Product, product_of
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes

if TYPE_CHECKING:
    from accel_state.device.device import Device
    from accel_state.session import Session

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)(/s)?", re.IGNORECASE)
_EXAMPLES = "'8x80GB' (eight devices of 80 GB), '80GiB' (one), '2x8x80GB' (two nodes of eight), '8xH100'"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices on nodes. Rates that are not given are guesses, good enough to rank strategies but not to predict times.

    Attributes:
        devices: number of devices on each node.
        nodes: number of nodes.
        memory: bytes of each device.
        host_memory: bytes of each node that offloading may use; None: unknown, and not checked.
        kind: device type, "cuda", "xla" or "cpu"; CPU ranks share their memory with offloaded tensors.
        flops: FLOP/s that one device reaches in matrix products.
        local: bytes a second that one device sends to others of its node.
        remote: bytes a second that one node sends to others.
        host: bytes a second between a device and host memory.
        latency: seconds of the smallest collective.
    """

    devices: int = 1
    nodes: int = 1
    memory: int = 80 * 10**9
    host_memory: int | None = None
    kind: str = "cuda"
    flops: float = 150e12
    local: float = 150e9
    remote: float = 50e9
    host: float = 20e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "memory"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("flops", "local", "remote", "host"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a rate above 0")

    @property
    def ranks(self) -> int:
        """Number of devices on all nodes, which is the number of processes."""
        return self.devices * self.nodes

    @property
    def spmd(self) -> bool:
        """Whether one process drives all devices that it sees (XLA) instead of one process each device."""
        from accel_state.device.kinds import DEVICE_KINDS

        kind = DEVICE_KINDS.get(self.kind)
        return kind is not None and kind.together

    @classmethod
    def parse(cls, text: str, *, nodes: int | None = None) -> "Hardware":
        """Parses ``[nodes x] [devices x] memory``, such as "8x80GB"; a product's name may replace the memory.

        Raises:
            ConfigError: the text has another form; the message names the forms that work.
        """
        # matches counts, but not the x in a product's name such as RTX4090 or MI300X
        counted = re.match(r"(?:[^a-z*]*[x*])*", text, flags=re.IGNORECASE)
        assert counted is not None
        *before, _ = re.split(r"[x*]", counted[0], flags=re.IGNORECASE)
        parts = [part.strip() for part in (*before, text[counted.end() :])]
        if not 1 <= len(parts) <= 3 or not all(parts):
            raise ConfigError(f"devices {text!r} are not understood; expected like {_EXAMPLES}")
        counts = []
        for part in parts[:-1]:
            if not part.isdecimal() or int(part) < 1:
                raise ConfigError(f"{part!r} in devices {text!r} is no number of devices; expected like {_EXAMPLES}")
            counts.append(int(part))
        given = counts[0] if len(counts) == 2 else None
        if given is not None and nodes is not None and given != nodes:
            raise ConfigError(f"devices {text!r} say {given} nodes, and nodes={nodes}; give one of them")
        hardware = cls(devices=counts[-1] if counts else 1, nodes=given or nodes or 1)
        product = PRODUCTS.get(parts[-1].upper())
        if product is not None:
            return replace(_at_rates_of(hardware, product), memory=product.memory, kind=product.kind)
        if not parts[-1][0].isdecimal():
            near = get_close_matches(parts[-1].upper(), PRODUCTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{parts[-1]!r} in devices {text!r} is neither a size nor one of {', '.join(PRODUCTS)}{hint}"
            )
        if parts[-1].isdecimal():
            count = parts[-1] if len(parts) == 1 else parts[0]
            raise ConfigError(
                f"devices {text!r} say nothing of a device's memory; give it or a name, as in {count}x80GB or "
                f"{count}xH100 ({', '.join(PRODUCTS)})"
            )
        return replace(hardware, memory=parse_size(parts[-1], what=f"devices {text!r}"))

    @classmethod
    def detect(cls, session: "Session") -> "Hardware":
        """Detects the devices of this run; ranks on a CPU share its memory and cores."""
        device, topology = session.device, session.topology
        total = device.memory().total
        per_node, nodes = topology.local_world_size, topology.num_nodes
        if device.type == "cpu":
            return cls.of_cpu(per_node, nodes, total)
        if device.kind.together:
            return cls.of_xla(devices_of(session), total)
        return _as_product(cls(devices=per_node, nodes=nodes, memory=total, kind=device.type), device)

    @classmethod
    def here(cls) -> "Hardware":
        """Detects the accelerators of this machine; its CPU as one device if it has none."""
        from accel_state.device.device import Device, count_devices
        from accel_state.topology import Topology

        device = Device.choose(Topology())
        if device.type == "cpu":
            return cls.of_cpu(1, 1, device.memory().total)
        count = max(1, count_devices(device.type))
        if device.kind.together:
            return cls.of_xla(count, device.memory().total)
        return _as_product(cls(devices=count, memory=device.memory().total, kind=device.type), device)

    @classmethod
    def of_xla(cls, devices: int, memory: int) -> "Hardware":
        """XLA devices on a machine's CPU, which share its ``memory``.

        Raises:
            ConfigError: on other XLA devices, which do not report their memory while one process drives all of them.
        """
        import torch_xla.runtime as runtime

        if runtime.device_type() != "CPU":
            raise ConfigError(
                f"{runtime.device_type()} devices do not tell their memory; describe them, as in hardware="
                f"'{devices}x16GB' or '{devices}xTPU-V5E'"
            )
        return replace(cls.of_cpu(devices, 1, memory), kind="xla")

    @classmethod
    def of_cpu(cls, devices: int, nodes: int, memory: int) -> "Hardware":
        """Ranks on CPUs that share a machine of ``memory`` bytes."""
        return cls(
            devices=devices,
            nodes=nodes,
            memory=memory // devices,
            kind="cpu",
            flops=100e9 / devices,
            local=2e9,
            remote=1e9,
            host=10e9,
            latency=200e-6,
        )

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.devices} x {readable_bytes(self.memory)}"


def devices_of(session: "Session") -> int:
    """Number of devices of a run: one for each process, or all devices that one process drives (SPMD)."""
    from accel_state.device.device import count_devices

    if session.device.kind.together:
        return count_devices(session.device.type)
    return session.world_size


def parse_size(text: str, *, what: str = "the size") -> int:
    """Parses "80GB" (10^9), "80GiB" (2^30) or a plain number into bytes; a rate may end in "/s".

    Raises:
        ConfigError: the text is not a size, or the size is zero.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    if found is None or (unit and unit not in _UNITS):
        near = get_close_matches(unit, _UNITS, n=1) if unit else []
        hint = f"; did you mean {near[0].upper()}?" if near else ""
        raise ConfigError(f"{text!r} in {what} is no size; expected like 80GB or 80GiB{hint}")
    size = int(float(found[1]) * _UNITS.get(unit, 1))
    if size < 1:
        raise ConfigError(f"{text!r} in {what} is nothing; expected a size above 0")
    return size


def _as_product(hardware: Hardware, device: "Device") -> Hardware:
    """Returns ``hardware`` with the rates of the device's product, if that product is known."""
    product = product_of(device.product_name())
    return hardware if product is None else _at_rates_of(hardware, product)


def _at_rates_of(hardware: Hardware, product: Product) -> Hardware:
    """Returns ``hardware`` with the fractions of the data sheet that matrix products and collectives reach."""
    return replace(hardware, flops=product.flops * 0.45, local=product.link * 0.75)
