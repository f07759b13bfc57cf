"""Reader for a process without a launcher."""

from collections.abc import Mapping

from accel_state.clusters.kubernetes import INDEX
from accel_state.clusters.variables import read_int
from accel_state.errors import TopologyError
from accel_state.topology import Topology


def read_single(env: Mapping[str, str]) -> Topology:
    """Returns the topology of a single process, unless leftovers show that a launch lost half of its variables.

    ``LOCAL_RANK=-1`` is an old spelling of "not distributed" and is accepted.

    Raises:
        TopologyError: ``WORLD_SIZE`` or ``LOCAL_RANK`` without the other variables, or a pod of an indexed Kubernetes
            Job without ``WORLD_SIZE``, where each pod would train a model of its own.
    """
    world_size = read_int(env, "WORLD_SIZE")
    if world_size is not None and world_size != 1:
        raise TopologyError(f"WORLD_SIZE={world_size} is set but RANK is not; set both or neither")
    local_rank = env.get("LOCAL_RANK", "").strip()
    if local_rank not in {"", "0", "-1"}:
        raise TopologyError(f"LOCAL_RANK={local_rank!r} is set but RANK and WORLD_SIZE are not; set all or none")
    if env.get(INDEX) and world_size is None and not _is_whole_tpu(env):
        raise TopologyError(
            f"{INDEX}={env[INDEX]!r} says that this is a pod of an indexed Kubernetes Job, but WORLD_SIZE is not set, "
            "and Kubernetes does not tell a pod how many there are; in the Job set WORLD_SIZE to its completions and "
            "MASTER_ADDR to the host name of pod 0, or WORLD_SIZE=1 if each pod trains by itself"
        )
    return Topology()


def _is_whole_tpu(env: Mapping[str, str]) -> bool:
    """Whether the TPU variables name this machine alone; several machines are read by ``TPUPodReader``."""
    return env.get("PJRT_DEVICE", "").upper() == "TPU" and bool(env.get("TPU_WORKER_HOSTNAMES"))
