"""Numbers, addresses and ports in launchers' variables, with the errors for invalid values."""

import zlib
from collections.abc import Mapping, Sequence

from accel_state.errors import TopologyError
from accel_state.topology import Topology

DEFAULT_PORT = 29500
LOCAL_ADDRESS = "127.0.0.1"
# Below Linux's ephemeral ports (32768 and up).
_JOB_PORTS = range(12000, 32000)
_STEP_PORTS = 4099  # far more than the difference between the ids of jobs that share a node
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID", "COBALT_JOBID", "JOB_ID")


def read_int(env: Mapping[str, str], name: str) -> int | None:
    """Returns the value of ``name`` as an integer >= 0, or None if it is unset or empty."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise TopologyError(f"{name}={text!r} is not a whole number >= 0")
    return int(text)


def need_int(env: Mapping[str, str], name: str, *, because: str) -> int:
    """Like ``read_int``, but raises TopologyError if ``name`` is unset although ``because`` is set."""
    value = read_int(env, name)
    if value is None:
        raise TopologyError(f"{because}={env.get(because)!r} is set but {name} is not; set both or neither")
    return value


def first_int(env: Mapping[str, str], *names: str) -> int | None:
    """Returns the value of the first of ``names`` that is set, or None."""
    return next((value for value in (read_int(env, name) for name in names) if value is not None), None)


def check_below(env: Mapping[str, str], name: str, size_name: str) -> None:
    """Raises TopologyError, naming both variables, if the rank in ``name`` is not below the size in ``size_name``."""
    rank, size = read_int(env, name), read_int(env, size_name)
    if rank is not None and size is not None and not rank < size:
        raise TopologyError(f"{name}={rank} is not below {size_name}={size}")


def is_local_address(address: str | None) -> bool:
    """Whether ``address`` is missing or a loopback or wildcard address, i.e. valid on this machine only."""
    return address is None or address in {"", "localhost", "::1", "0.0.0.0"} or address.startswith("127.")


def master_port(env: Mapping[str, str], *, step: int = 0) -> int:
    """Returns ``MASTER_PORT``, or a port that all processes of a batch job derive from the job id, and from ``step``.

    Two jobs, or steps of a job, that share a node therefore rarely use the same port. Without a job id the port is
    torch's default, 29500.
    """
    given = read_int(env, "MASTER_PORT")
    if given is not None:
        return given
    job = next((env[name] for name in _JOB_VARIABLES if env.get(name)), None)
    if job is None:
        return DEFAULT_PORT
    number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return _JOB_PORTS[(number + _STEP_PORTS * step) % len(_JOB_PORTS)]


def master_address(env: Mapping[str, str], *, num_nodes: int, hosts: Sequence[str] = (), launcher: str) -> str:
    """Returns ``MASTER_ADDR``; if unset, the loopback address for one node, otherwise the first of ``hosts``."""
    given = env.get("MASTER_ADDR")
    if given:
        return given
    if num_nodes == 1:
        return LOCAL_ADDRESS
    if hosts:
        return hosts[0]
    raise TopologyError(
        f"{launcher} started {num_nodes} nodes but names no address of rank 0; set MASTER_ADDR on every node"
    )


def from_counts(
    env: Mapping[str, str],
    *,
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str,
    hosts: Sequence[str] = (),
) -> Topology:
    """Builds the topology from rank, world size, local rank and local size, which every MPI sets.

    The number of nodes is the world size divided by the local size, rounded up; an estimate if nodes have unequal
    sizes.
    """
    rank = need_int(env, rank_name, because=size_name)
    world_size = need_int(env, size_name, because=rank_name)
    check_below(env, rank_name, size_name)
    local_rank = read_int(env, local_rank_name)
    local_size = read_int(env, local_size_name)
    if local_rank is None and local_size is None and is_local_address(env.get("MASTER_ADDR")):
        local_rank, local_size = rank, world_size
    else:
        local_rank = need_int(env, local_rank_name, because=rank_name)
        local_size = need_int(env, local_size_name, because=rank_name)
    check_below(env, local_rank_name, local_size_name)
    if not 0 < local_size <= world_size:
        raise TopologyError(f"{local_size_name}={local_size} does not fit into {size_name}={world_size}")
    num_nodes = -(-world_size // local_size)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=min(rank // local_size, num_nodes - 1),
        num_nodes=num_nodes,
        launcher=launcher,
        master_addr=master_address(env, num_nodes=num_nodes, hosts=hosts, launcher=launcher),
        master_port=master_port(env),
    )


def outer_hosts(env: Mapping[str, str]) -> list[str]:
    """Returns the hosts of the Slurm or LSF job around an MPI launch; empty if no variable lists them."""
    from accel_state.clusters.hosts import expand_hosts, lsf_hosts

    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    return expand_hosts(nodelist) if nodelist else lsf_hosts(env)
