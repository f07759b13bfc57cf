"""TPU pods: one process on each machine, which drives the cores there and computes as one with the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from accel_state.clusters.variables import master_port, need_int
from accel_state.errors import TopologyError
from accel_state.topology import Topology

_ADDRESSES, _NUMBER = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"


@final
@dataclass(frozen=True, slots=True)
class PodPlace:
    """Which machine of a pod this is.

    Attributes:
        worker: its number.
        addresses: where all of them are reached, by number.

    Raises:
        TopologyError: a number without an address.
    """

    worker: int
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.worker < len(self.addresses):
            raise TopologyError(
                f"this is machine {self.worker} of a TPU pod that has {len(self.addresses)} ({_NUMBER}, {_ADDRESSES}): "
                f"{', '.join(self.addresses)}"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "PodPlace | None":
        """What ``TPU_WORKER_ID`` and ``TPU_WORKER_HOSTNAMES`` say; None where they name no pod of several machines.

        Raises:
            TopologyError: several machines and no number, or one that is not among theirs.
        """
        addresses = tuple(part.strip() for part in env.get(_ADDRESSES, "").split(",") if part.strip())
        if len(addresses) < 2:
            return None
        return cls(need_int(env, _NUMBER, because=_ADDRESSES), addresses)


@final
class TPUPodReader:
    """Reads the variables that Google Kubernetes Engine gives to the machines of a pod, where ``PJRT_DEVICE`` is TPU.

    Machines elsewhere do not have them; ``accel launch --tpu`` asks those themselves.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """The topology when this is one of several machines of a pod."""
        place = PodPlace.from_env(env) if env.get("PJRT_DEVICE", "").upper() == "TPU" else None
        if place is None:
            return None
        return Topology(
            rank=place.worker,
            world_size=len(place.addresses),
            node_rank=place.worker,
            num_nodes=len(place.addresses),
            launcher="tpu",
            master_addr=env.get("MASTER_ADDR") or place.addresses[0],
            master_port=master_port(env),
        )
