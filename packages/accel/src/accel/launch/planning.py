"""Which processes a job starts on this machine: argv and environment of each, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from accel.config.model import DOCUMENT_VARIABLE, AccelConfig
from accel.launch.host import HostFacts
from accel_state.errors import LaunchError

_VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}
_LOOPBACK = "127.0.0.1"
_WORKER = "accel.launch.worker"


@final
@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: what it executes, and what its environment has beyond the launcher's own."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@final
@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that will be started on this machine. ``direct`` means that the process replaces the launcher.

    ``main_port`` 0 is a free port, chosen anew for each attempt and then added as ``MASTER_PORT``.
    """

    config: AccelConfig = field(repr=False)
    processes: tuple[ProcessPlan, ...]
    num_processes: int
    main_address: str
    main_port: int
    direct: bool

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``accel launch --dry-run --json``."""
        return {
            "direct": self.direct,
            "machine": {"rank": self.config.machine_rank, "of": self.config.num_machines},
            "main_process": {"address": self.main_address, "port": self.main_port or "free"},
            "max_restarts": self.config.max_restarts,
            "num_processes": self.num_processes,
            "processes": [
                {"rank": process.rank, "argv": list(process.argv), "env": dict(process.env)}
                for process in self.processes
            ],
        }


def plan(config: AccelConfig, program: Sequence[str], host: HostFacts, *, env: Mapping[str, str]) -> LaunchPlan:
    """The plan for ``program`` (its name and arguments) on one machine; decides only, and looks at nothing else.

    ``env`` is the launcher's environment: what the user set there is kept (``OMP_NUM_THREADS``).

    Raises:
        LaunchError: where the settings contradict each other or the machine cannot hold them.
    """
    check_settings(config)
    local = _processes_here(config, host)
    total = local * config.num_machines
    address = config.main_process_ip if config.num_machines > 1 and config.main_process_ip else _LOOPBACK
    port = config.main_process_port or 0
    supervised = config.max_restarts > 0 or config.prefix_output or config.log_dir is not None
    direct = total == 1 and not supervised
    argv = _direct_argv(config, program, host) if direct else _worker_argv(config, program, host)
    shared = _shared_env(config, host, local=local, env=env)
    processes = []
    for local_rank in range(local):
        rank = config.machine_rank * local + local_rank
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(config.machine_rank),
            "GROUP_WORLD_SIZE": str(config.num_machines),
            "MASTER_ADDR": address,
        }
        # Machines agree on a port of their own for each attempt; the given one is where the launchers meet.
        if port and config.num_machines == 1:
            place["MASTER_PORT"] = str(port)
        processes.append(ProcessPlan(rank, local_rank, argv, place | shared))
    return LaunchPlan(config, tuple(processes), total, address, port, direct)


def check_settings(config: AccelConfig) -> None:
    """Refuses settings that contradict each other on any machine.

    Raises:
        LaunchError: naming both values and what would work.
    """
    machines = config.num_machines
    if config.cpu and config.multi_gpu:
        raise LaunchError("cpu and multi_gpu are both set; drop one of them")
    if config.module and config.no_python:
        raise LaunchError("module and no_python are both set; a module needs Python, so drop one of them")
    if config.multi_gpu and config.num_processes == 1:
        raise LaunchError("multi_gpu needs 2 or more processes, num_processes is 1; drop one of them")
    if config.machine_rank >= machines:
        raise LaunchError(
            f"machine_rank is {config.machine_rank} of num_machines {machines}; expected 0 to {machines - 1}"
        )
    if machines > 1 and not (config.main_process_ip and config.main_process_port):
        raise LaunchError(
            f"{machines} machines need main_process_ip and main_process_port, the same on each: "
            f"an address of machine 0 and a free port there, like 29500"
        )
    total = config.num_processes
    if total is not None and total % machines:
        below, above = total // machines * machines, (total // machines + 1) * machines
        raise LaunchError(
            f"num_processes counts all machines: {total} cannot be shared by {machines} machines; "
            f"nearest that can: {below or above}"
        )


def _processes_here(config: AccelConfig, host: HostFacts) -> int:
    ids = _gpu_ids(config, host)
    usable = len(ids) if ids is not None else host.num_accelerators
    if config.multi_gpu and usable < 2:
        raise LaunchError(f"multi_gpu needs 2 or more accelerators, this machine offers {usable}; drop multi_gpu")
    if config.num_processes is None:
        return usable or 1
    local = config.num_processes // config.num_machines
    if usable and local > usable:
        raise LaunchError(
            f"{local} processes on this machine, but {usable} accelerator{'s' * (usable > 1)} ({host.accelerator}); "
            f"num_processes {usable * config.num_machines} would fit, or cpu to train without accelerators"
        )
    return local


def _gpu_ids(config: AccelConfig, host: HostFacts) -> tuple[str, ...] | None:
    if config.gpu_ids is None or config.gpu_ids == "all":
        return None
    ids = tuple(part.strip() for part in config.gpu_ids.split(","))
    known = [str(index) for index in range(host.num_accelerators)]
    strange = [part for part in ids if part not in known]
    if strange or len(set(ids)) < len(ids):
        offered = ",".join(known) or "none, this machine has no accelerator"
        raise LaunchError(f"gpu_ids is {config.gpu_ids!r}; expected all, or different ones of: {offered}")
    return ids


def _shared_env(config: AccelConfig, host: HostFacts, *, local: int, env: Mapping[str, str]) -> dict[str, str]:
    shared = {DOCUMENT_VARIABLE: config.to_document()}
    if config.log_level is not None:
        # Loggers are made before, and without, any Accelerator that would read the document.
        shared["ACCEL_LOG_LEVEL"] = config.log_level
    threads = config.num_cpu_threads_per_process
    if threads is None and local > 1 and not env.get("OMP_NUM_THREADS"):
        # Each process would otherwise take every core for itself.
        threads = max(1, host.num_cores // local)
    if threads is not None:
        shared["OMP_NUM_THREADS"] = str(threads)
    ids = _gpu_ids(config, host)
    if ids is not None and host.accelerator is not None:
        variable = _VISIBLE_DEVICES.get(host.accelerator)
        if variable is None:
            raise LaunchError(f"gpu_ids is {config.gpu_ids!r}, but {host.accelerator} devices cannot be chosen so")
        # The indices count what the launcher itself may see.
        visible = [part.strip() for part in env.get(variable, "").split(",") if part.strip()]
        shared[variable] = ",".join(visible[int(index)] if visible else index for index in ids)
    return shared


def _direct_argv(config: AccelConfig, program: Sequence[str], host: HostFacts) -> tuple[str, ...]:
    if config.no_python:
        return tuple(program)
    return (host.python, *(("-m",) if config.module else ()), *program)


def _worker_argv(config: AccelConfig, program: Sequence[str], host: HostFacts) -> tuple[str, ...]:
    kind = "command" if config.no_python else "module" if config.module else "script"
    # -P: nothing in the current folder can stand in for the modules of the worker.
    return (host.python, "-P", "-m", _WORKER, kind, *program)
