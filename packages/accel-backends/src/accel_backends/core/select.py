"""Selection of a run's backend, with reasons."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from accel_backends.core.config import BackendConfig

if TYPE_CHECKING:
    from accel_state.device.device import Device
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
) -> Choice:
    """Selects a backend from the run's environment and configuration; pure.

    A string is the backend's name, and the class of a config determines its backend. Without either, or with a config
    that needs several ranks in a run of one process, the backend is ``xla`` on XLA devices, ``single`` for one process
    and ``ddp`` for several. Whether the backend is installed and supports the run is checked later, when the backend is
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
    if device.type == "xla":
        return Choice("xla", (*reasons, f"the device is {device.type}"))
    if topology.world_size == 1:
        return Choice("single", (*reasons, here, f"device {device.type}"))
    if facts is not None and facts.trainable == 0:
        return Choice("ddp", (here, "no parameter is trained, so models stay bare"))
    return Choice("ddp", (here, f"device {device.type}", "nothing asked for sharding, so each holds the full model"))
