"""The place of this process among all processes of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

from accel_state.errors import TopologyError


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """The place of one process: its rank, the sizes around it, and who told us.

    ``local_*`` counts the processes of one node, ``node_*`` the nodes. ``launcher`` names the reader that found
    the values ("single" when nothing was launched). ``master_addr`` and ``master_port`` say where rank 0 listens;
    None when the launcher did not say, which one process never needs.

    Raises:
        TopologyError: a rank is not below its size, a size is below one, or a part is larger than the whole.
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
        """Reads ``env`` (usually ``os.environ``) and nothing else.

        The built-in readers are asked in a fixed order (torchrun first), then those that other packages install
        under the entry-point group ``accel.clusters``. Without any launcher's variables the process is alone.

        Raises:
            TopologyError: a launcher's variables are incomplete or contradict each other.
        """
        from accel_state.clusters import read_environment

        return read_environment(env)

    @classmethod
    def on_one_node(cls, rank: int, world_size: int, *, launcher: str = "single") -> "Topology":
        """The topology of ``world_size`` processes that share this machine."""
        return cls(rank, world_size, local_rank=rank, local_world_size=world_size, launcher=launcher)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of all processes."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
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
    """Reads one launcher's variables; the extension point of the entry-point group ``accel.clusters``."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """The topology that ``env`` describes, or None when this launcher did not start the process."""
        ...


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise TopologyError(f"{size_name}={size}; expected at least 1")
    if not 0 <= rank < size:
        raise TopologyError(f"{name}={rank} is not below {size_name}={size}; expected 0 to {size - 1}")
