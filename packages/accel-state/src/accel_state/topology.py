"""Topology: rank, world size and node of this process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

from accel_state.errors import TopologyError


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Rank, sizes and node of one process, and the launcher they were read from.

    ``local_*`` are rank and size on one node, ``node_*`` and ``num_nodes`` those of the nodes. ``launcher`` is the name
    of the reader ("single" without a launcher). ``master_addr`` and ``master_port`` are the address of rank 0's store;
    None if the launcher gives none (a single process needs none).

    Raises:
        TopologyError: a rank is not below its size, a size is below one, or a local size exceeds the world size.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "single"
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        for name, size_name in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
            _check_rank(name, getattr(self, name), size_name, getattr(self, size_name))
        for name in ("local_world_size", "num_nodes"):
            if getattr(self, name) > self.world_size:
                raise TopologyError(f"{name}={getattr(self, name)} exceeds world_size={self.world_size}")
        if self.master_port is not None and not 0 <= self.master_port < 65536:
            raise TopologyError(f"master_port={self.master_port} is not a port; expected 0 to 65535")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Topology":
        """Reads the topology from ``env`` (usually ``os.environ``) and nothing else.

        Tries the built-in readers in a fixed order (torchrun first), then the readers that other packages install in
        the entry-point group ``accel.clusters``. Without any launcher's variables the process is a single one.

        Raises:
            TopologyError: a launcher's variables are incomplete or contradict each other.
        """
        from accel_state.clusters import read_environment

        return read_environment(env)

    @classmethod
    def on_one_node(cls, rank: int, world_size: int, *, launcher: str = "single") -> "Topology":
        """Returns the topology of ``world_size`` processes on this machine."""
        return cls(rank, world_size, local_rank=rank, local_world_size=world_size, launcher=launcher)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0 of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process has the highest rank."""
        return self.rank == self.world_size - 1

    def __str__(self) -> str:
        node = "" if self.num_nodes == 1 else f" on node {self.node_rank} of {self.num_nodes}"
        local = f"local {self.local_rank} of {self.local_world_size}"
        return f"rank {self.rank} of {self.world_size} ({local}){node}, by {self.launcher}"


class ClusterReader(Protocol):
    """Reader of one launcher's variables; the extension point of the entry-point group ``accel.clusters``."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology that ``env`` describes, or None if this launcher did not start the process."""
        ...


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise TopologyError(f"{size_name}={size}; expected at least 1")
    if not 0 <= rank < size:
        raise TopologyError(f"{name}={rank} is not below {size_name}={size}; expected 0 to {size - 1}")
