"""Reader for torchrun and launchers that set its variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.kubernetes import is_pod_rank
from accel_state.clusters.variables import check_below, first_int, is_local_address, need_int, read_int
from accel_state.errors import TopologyError
from accel_state.topology import Topology


@final
class TorchrunReader:
    """Reads torchrun's variables, or only RANK and WORLD_SIZE of a script on one machine."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if ``RANK`` is set, except by a PyTorchJob with one process per pod; otherwise None."""
        if not env.get("RANK") or is_pod_rank(env):
            return None
        rank = need_int(env, "RANK", because="WORLD_SIZE")
        world_size = need_int(env, "WORLD_SIZE", because="RANK")
        check_below(env, "RANK", "WORLD_SIZE")
        local_rank, local_size = _local(env, rank, world_size)
        # torchrun counts agents as nodes: two agents on one machine are two nodes, also here.
        node_rank, num_nodes = read_int(env, "GROUP_RANK"), read_int(env, "GROUP_WORLD_SIZE")
        if num_nodes is None:
            num_nodes = -(-world_size // local_size)
        check_below(env, "GROUP_RANK", "GROUP_WORLD_SIZE")
        if num_nodes == 1 and local_size != world_size:
            raise TopologyError(f"one node, but LOCAL_WORLD_SIZE={local_size} differs from WORLD_SIZE={world_size}")
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=min(rank // local_size, num_nodes - 1) if node_rank is None else node_rank,
            num_nodes=num_nodes,
            launcher="accel launch" if env.get("ACCEL_LAUNCHER_PID") else "torchrun",
            master_addr=env.get("MASTER_ADDR") or None,
            master_port=read_int(env, "MASTER_PORT"),
        )


def _local(env: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    local_rank = read_int(env, "LOCAL_RANK")
    local_size = first_int(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    if local_size is not None:
        if local_rank is None:
            local_rank = need_int(env, "LOCAL_RANK", because="RANK")
        check_below(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not 0 < local_size <= world_size:
            raise TopologyError(f"LOCAL_WORLD_SIZE={local_size} does not fit into WORLD_SIZE={world_size}")
        return local_rank, local_size
    if is_local_address(env.get("MASTER_ADDR")) or world_size == 1:
        return (rank if local_rank is None else local_rank), world_size
    raise TopologyError(
        f"RANK={rank} and WORLD_SIZE={world_size} with MASTER_ADDR={env.get('MASTER_ADDR')!r} do not say how many "
        "processes share this node; set LOCAL_RANK and LOCAL_WORLD_SIZE"
    )
