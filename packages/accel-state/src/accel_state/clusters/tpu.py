"""Reader for TPU pods: one process per machine, which drives the cores of its machine (SPMD over all machines)."""

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
    """Number of this machine in a TPU pod, and the addresses of all machines.

    Attributes:
        worker: number of this machine.
        addresses: address of each machine, indexed by its number.

    Raises:
        TopologyError: ``worker`` is not an index of ``addresses``.
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
        """Reads ``TPU_WORKER_ID`` and ``TPU_WORKER_HOSTNAMES``; None if fewer than two machines are listed.

        Raises:
            TopologyError: several machines are listed and ``TPU_WORKER_ID`` is missing or out of range.
        """
        addresses = tuple(part.strip() for part in env.get(_ADDRESSES, "").split(",") if part.strip())
        if len(addresses) < 2:
            return None
        return cls(need_int(env, _NUMBER, because=_ADDRESSES), addresses)


@final
class TPUPodReader:
    """Reads the variables that Google Kubernetes Engine sets on the machines of a pod, if ``PJRT_DEVICE`` is TPU.

    Outside GKE these variables do not exist; ``accel launch --tpu`` queries the machines instead.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if this is one of several machines of a pod; otherwise None."""
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
