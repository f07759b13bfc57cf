"""Reader for Slurm: processes that srun started."""

import re
from collections.abc import Mapping
from typing import final

from accel_state.clusters.hosts import expand_hosts
from accel_state.clusters.variables import check_below, first_int, master_address, master_port, need_int, read_int
from accel_state.errors import TopologyError
from accel_state.topology import Topology

# Set only by srun, for its tasks.
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_SRUN_COMM_HOST")
# Set by Slurm in every batch script, where SLURM_PROCID=0 does not mean that other tasks exist.
_BATCH_VARIABLES = ("SLURM_TASK_PID", "SLURM_SUBMIT_DIR")
_REPEAT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# Step ids from here to 2**32 stand for the body of a batch script, the shell of salloc and the like (slurm.h). Slurm
# 26.05 sets them in these shells, as negative numbers of 32 bits.
_NO_STEP = 0xFFFFFFF0


@final
class SlurmReader:
    """Reads SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the node list. Source: srun(1), its output variables.

    A shell inside an allocation (salloc, ``srun --pty``, the body of an sbatch script) is a single process, whatever
    the number of allocated tasks, because the other tasks were never started.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if srun started this process as one of its tasks; otherwise None."""
        if not env.get("SLURM_PROCID") or _is_shell(env):
            return None
        rank = need_int(env, "SLURM_PROCID", because="SLURM_NTASKS")
        size_name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        world_size = need_int(env, size_name, because="SLURM_PROCID")
        check_below(env, "SLURM_PROCID", size_name)
        _check_agrees(env, "WORLD_SIZE", size_name, world_size)
        hosts = _hosts(env)
        num_nodes = first_int(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or len(hosts) or 1
        num_nodes = min(num_nodes, world_size)
        node_rank = read_int(env, "SLURM_NODEID") or 0
        local_rank = read_int(env, "SLURM_LOCALID")
        if local_rank is None:
            local_rank = rank if num_nodes == 1 else need_int(env, "SLURM_LOCALID", because="SLURM_PROCID")
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_tasks_on_node(env, node_rank, num_nodes=num_nodes, world_size=world_size),
            node_rank=node_rank,
            num_nodes=num_nodes,
            launcher="slurm",
            master_addr=master_address(env, num_nodes=num_nodes, hosts=hosts, launcher="slurm"),
            # Several steps of a job may run at once.
            master_port=master_port(env, step=read_int(env, "SLURM_STEP_ID") or 0),
        )


def _is_shell(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "0").strip()
    if step.startswith("-") or (step.isdecimal() and int(step) >= _NO_STEP):
        return True
    # Steps started from a pty shell inherit its variables. They are not the allocation's first step, unless salloc made
    # the shell; and only the first task of a pty step has the terminal.
    if env.get("SLURM_PTY_PORT") and step == "0" and env["SLURM_PROCID"].strip() == "0":
        return True
    in_step = any(env.get(name) for name in _STEP_VARIABLES)
    return not in_step and any(env.get(name) for name in _BATCH_VARIABLES)


def _hosts(env: Mapping[str, str]) -> list[str]:
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    return expand_hosts(nodelist) if nodelist else []


def _tasks_on_node(env: Mapping[str, str], node_rank: int, *, num_nodes: int, world_size: int) -> int:
    """Tasks on this node, from Slurm's list such as ``"4(x2),3"`` (four on each of two nodes, then three)."""
    name = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text = env.get(name)
    if num_nodes == 1:
        return world_size
    if not text:
        given = read_int(env, "SLURM_NTASKS_PER_NODE")
        return given or -(-world_size // num_nodes)
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEAT.fullmatch(part.strip())
        if match is None:
            raise TopologyError(f"cannot read {name}={text!r}; expected like '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise TopologyError(f"SLURM_NODEID={node_rank}, but {name}={text!r} lists {len(counts)} nodes")
    return counts[node_rank]


def _check_agrees(env: Mapping[str, str], name: str, slurm_name: str, value: int) -> None:
    given = read_int(env, name)
    if given is not None and given != value:
        raise TopologyError(
            f"{name}={given} contradicts {slurm_name}={value}; unset {name} or run one srun task per rank"
        )
