"""Selection of a run's backend, with the reasons."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from accel_backends.core.config import BackendConfig

if TYPE_CHECKING:
    from accel_state.device.device import Device
    from accel_state.topology import Topology


@final
@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about models that selection depends on: numbers and flags, no modules.

    ``trainable`` parameters and ``sharded`` ones (DTensors already) are counted; None where models are not known yet.
    """

    trainable: int | None = None
    sharded: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name, and the reasons for it in the order in which they were found."""

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
    """Chooses from the run's environment and configuration; pure.

    A config's class names its backend, and a string names one; without either, or with one that one process has no use
    for, it is ``single`` for one process, ``ddp`` for several, ``xla`` on XLA devices. Whether the backend is installed
    and able is checked when it is loaded and opened.
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
