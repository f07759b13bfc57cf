"""Selection of a run's backend, with reasons."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from accel_backends.core.capabilities import RECORDING
from accel_backends.core.config import BackendConfig
from accel_state.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from accel_state.device.device import Device
    from accel_state.parallelism.config import ParallelismConfig
    from accel_state.topology import Topology


@final
@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about models that selection depends on: counts, no modules.

    ``trainable``: number of trainable parameters; ``sharded``: number of parameters that are DTensors already. None if
    the models are not known yet.
    """

    trainable: int | None = None
    sharded: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """Name of the selected backend, and the reasons in the order in which they were found."""

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"backend {self.name}: {'; '.join(self.reasons)}"


def select_backend(
    topology: "Topology",
    device: "Device",
    config: BackendConfig | str | None = None,
    facts: ModelFacts | None = None,
    *,
    axes: Collection[str] = (),
) -> Choice:
    """Selects a backend from the run's environment and configuration; pure.

    A string is the backend's name, and the class of a config determines its backend. Without either, or with a config
    that needs several ranks in a run of one process, the backend is ``xla`` on XLA devices, ``single`` for one process
    and ``ddp`` for several; if that does not serve ``axes``, the axes of degrees above 1, it is the backend that does
    (see ``find_backend``). Whether the backend is installed and supports the run is checked later, when the backend is
    loaded and opened.
    """
    if isinstance(config, str):
        return Choice(config, (f"strategy {config!r} was asked for",))
    here = "one process" if topology.world_size == 1 else f"{topology.world_size} processes"
    reasons: tuple[str, ...] = ()
    if config is not None and config.backend:
        reasons = (f"{type(config).__name__} was given",)
        if topology.world_size > 1 or not config.needs_ranks:
            return Choice(config.backend, reasons)
        reasons += (f"but there is {here}, with which its backend has nothing to do",)
    found = None if set(axes) <= BackendConfig.axes else find_backend(axes)
    if found is not None:
        return Choice(found, (*reasons, f"it serves the axes {', '.join(axes)}"))
    if device.type in RECORDING:
        return Choice(device.type, (*reasons, f"the device is {device.type}"))
    if topology.world_size == 1:
        return Choice("single", (*reasons, here, f"device {device.type}"))
    if facts is not None and facts.trainable == 0:
        return Choice("ddp", (here, "no parameter is trained, so models stay bare"))
    return Choice("ddp", (here, f"device {device.type}", "nothing asked for sharding, so each holds the full model"))


def find_backend(axes: Collection[str]) -> str | None:
    """Returns the backend that serves all of ``axes`` and need not be named; None if there is none.

    accel's own backends are tried first, so that installing a package changes no script that works without it. Other
    installed backends are imported only if none of them serves the axes.

    Raises:
        ConfigError: several of the others have the same precedence.
    """
    from accel_backends.core.registry import OWN, installed_backends

    own = _serving(OWN, axes)
    found = own or _serving([name for name in installed_backends() if name not in OWN], axes)
    ranked = sorted((place, name) for name, place in found.items() if place is not None)
    if not own and len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
        same = [name for place, name in ranked if place == ranked[0][0]]
        raise ConfigError(
            f"{' and '.join(sorted(axes))}: backends {', '.join(map(repr, same))} serve that alike; nearest: "
            f"strategy={same[0]!r}"
        )
    return ranked[0][1] if ranked else None


def check_axes(name: str, config: BackendConfig, parallelism: "ParallelismConfig") -> None:
    """Refuses degrees above 1 of axes, and a capacity of undivided experts, that a backend does not serve.

    Raises:
        ConfigError: names the nearest strategy that serves all axes together.
    """
    active = parallelism.active_mesh_dims
    other = [axis for axis in active if axis not in config.axes]
    if other:
        raise ConfigError(
            f"{', '.join(f'{axis}_size={parallelism.size(axis)}' for axis in other)}: backend {name!r} cannot do that; "
            f"nearest: {_nearest(active) or f'dp_replicate_size={parallelism.total_size}'}"
        )

    experts = parallelism.ep_handler
    bounded = experts is not None and experts.capacity_factor is not None and not parallelism.ep_enabled
    if bounded and not config.bounds_experts:
        raise ConfigError(
            f"ep_handler={experts} with ep_size=1: backend {name!r} gives undivided experts no capacity; nearest: "
            "ep_handler=None, or strategy='fsdp'"
        )


def _nearest(axes: Collection[str]) -> str | None:
    from accel_backends.core.registry import OWN, installed_backends

    able = _serving(OWN, axes) or _serving(installed_backends(), axes)
    return f"strategy={next(iter(able))!r}" if able else None


def _serving(names: Collection[str], axes: Collection[str]) -> dict[str, int | None]:
    """Precedence of each backend that serves all of ``axes``; a backend that cannot be imported serves none."""
    from accel_backends.core.registry import load_backend

    found = {}
    for name in names:
        try:
            options = load_backend(name).Config
        except BackendError:
            continue
        if options.serves(axes):
            found[name] = options.precedence
    return found
