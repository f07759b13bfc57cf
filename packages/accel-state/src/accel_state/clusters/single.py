"""A process that no launcher started."""

from collections.abc import Mapping

from accel_state.clusters.variables import read_int
from accel_state.errors import TopologyError
from accel_state.topology import Topology


def read_single(env: Mapping[str, str]) -> Topology:
    """One process, unless leftovers say that a launch lost half of its variables.

    ``LOCAL_RANK=-1`` is an old way to say "not distributed" and accepted as that.
    """
    world_size = read_int(env, "WORLD_SIZE")
    if world_size is not None and world_size != 1:
        raise TopologyError(f"WORLD_SIZE={world_size} is set but RANK is not; set both or neither")
    local_rank = env.get("LOCAL_RANK", "").strip()
    if local_rank not in {"", "0", "-1"}:
        raise TopologyError(f"LOCAL_RANK={local_rank!r} is set but RANK and WORLD_SIZE are not; set all or none")
    return Topology()
