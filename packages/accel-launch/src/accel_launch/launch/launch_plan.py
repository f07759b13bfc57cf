"""Plan of the processes of this machine: argv and environment of each, before any process starts."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from accel_launch.config.model import DOCUMENT_VARIABLE, AccelConfig
from accel_launch.config.resolve import without_launcher
from accel_launch.launch.checks import check_settings, machine_range
from accel_launch.launch.child_main import COMPAT, ERROR_FILE_VARIABLE, LAUNCHER_VARIABLE
from accel_launch.launch.host import HostFacts
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.errors import LaunchError

_VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}
# If one of these is set, torch for AMD's GPUs passes over CUDA_VISIBLE_DEVICES; the first chooses among the devices
# that the second leaves. Slurm may set the second on other machines, too.
_OF_AMD = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Variables about the processes of one attempt, also those of torchrun. A process of an outer launcher has them.
_OF_ATTEMPTS = (
    *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")),
    ERROR_FILE_VARIABLE,
    LAUNCHER_VARIABLE,
)
_LOOPBACK = "127.0.0.1"
_WORKER = "accel_launch.launch.child_main"


@final
@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: its command, and the variables that are added to the launcher's environment.

    ``unset`` are variables that an outer launcher wrote for this launcher, and that do not apply to the process.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The full environment, based on the launcher's."""
        return {name: value for name, value in base.items() if name not in self.unset} | dict(self.env)


@final
@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All processes to start on this machine. ``direct``: the process replaces the launcher.

    ``main_port`` 0 stands for a free port, which is chosen for each attempt and then added as ``MASTER_PORT``.
    """

    config: AccelConfig = field(repr=False)
    processes: tuple[ProcessPlan, ...]
    num_processes: int
    main_address: str
    main_port: int
    direct: bool
    num_machines: int = 1
    min_machines: int = 1

    def __str__(self) -> str:
        how = "replaces the launcher" if self.direct else f"{len(self.processes)} started here"
        port = self.main_port or "a free port"
        lines = [f"# {self.num_processes} in all, {how}; main process at {self.main_address}, {port}"]
        for process in self.processes:
            lines += ["", f"# rank {process.rank}"]
            lines += [f"{name}={shlex.quote(value)} \\" for name, value in process.env.items()]
            lines.append(shlex.join(process.argv))
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``accel launch --dry-run --json``."""
        return {
            "direct": self.direct,
            "machine": {"rank": self.config.machine_rank, "of": self.num_machines, "at_least": self.min_machines},
            "main_process": {"address": self.main_address, "port": self.main_port or "free"},
            "max_restarts": self.config.max_restarts,
            "num_processes": self.num_processes,
            "processes": [
                {"rank": process.rank, "argv": list(process.argv), "env": dict(process.env)}
                for process in self.processes
            ],
        }


def plan(config: AccelConfig, program: Sequence[str], host: HostFacts, *, env: Mapping[str, str]) -> LaunchPlan:
    """Plans the processes of ``program`` (its name and arguments) on one machine; a pure function of its arguments.

    ``env`` is the launcher's environment; variables that the user set there are kept (``OMP_NUM_THREADS``).

    Raises:
        LaunchError: the settings contradict each other, or the machine does not suffice for them.
    """
    check_settings(config)
    few, many = machine_range(config)
    local = _processes_here(config, host)
    total = local * many
    address = config.main_process_ip if many > 1 and config.main_process_ip else _LOOPBACK
    port = config.main_process_port or (DEFAULT_PORT if many > 1 else 0)
    supervised = (
        config.max_restarts > 0
        or config.prefix_output
        or config.log_dir is not None
        or config.tee != "0"
        or config.end_with_stdin
        or many > 1
    )
    direct = total == 1 and not supervised
    argv = _direct_argv(config, program, host) if direct else _worker_argv(config, program, host)
    shared = _shared_env(config, host, local=local, env=env)
    outer = {*(set(env) - set(without_launcher(env))), *(name for name in _OF_ATTEMPTS if name in env)}
    unset = tuple(sorted(outer - {DOCUMENT_VARIABLE}))
    processes = []
    for local_rank in range(local):
        rank = config.machine_rank * local + local_rank
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(config.machine_rank),
            "GROUP_WORLD_SIZE": str(many),
            "ROLE_NAME": config.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(total),
            "MASTER_ADDR": address,
        }
        # Several nodes agree on another port for each attempt; the given port is that of the launchers' rendezvous.
        if port and many == 1:
            place["MASTER_PORT"] = str(port)
        processes.append(ProcessPlan(rank, local_rank, argv, place | shared, unset))
    return LaunchPlan(config, tuple(processes), total, address, port, direct, num_machines=many, min_machines=few)


def _processes_here(config: AccelConfig, host: HostFacts) -> int:
    if config.tpu:
        return 1
    ids = _gpu_ids(config, host)
    usable = len(ids) if ids is not None else host.num_accelerators
    if config.multi_gpu and usable < 2:
        raise LaunchError(f"multi_gpu needs 2 or more accelerators, this machine offers {usable}; drop multi_gpu")
    if config.num_processes is None:
        return usable or 1
    many = machine_range(config)[1]
    local = config.num_processes // many
    if usable and local > usable:
        raise LaunchError(
            f"{local} processes on this machine, but {usable} accelerator{'s' * (usable > 1)} ({host.accelerator}); "
            f"num_processes {usable * many} would fit, or cpu to train without accelerators"
        )
    return local


def _named(variables: str | None) -> dict[str, str]:
    """Parses ``A=1,B=2`` into a mapping."""
    items = [item.strip() for item in (variables or "").split(",") if item.strip()]
    for item in items:
        if not item.partition("=")[0].isidentifier() or "=" not in item:
            raise LaunchError(f"env has {item!r}; expected NAME=value, with commas between several")
    return {name: value for name, _, value in (item.partition("=") for item in items)}


def _gpu_ids(config: AccelConfig, host: HostFacts) -> tuple[str, ...] | None:
    if config.gpu_ids is None or config.gpu_ids == "all":
        return None
    if config.cpu and config.origin("gpu_ids").source in ("file", "env"):
        return None  # meant for launches on accelerators
    ids = tuple(part.strip() for part in config.gpu_ids.split(","))
    known = [str(index) for index in range(host.num_accelerators)]
    strange = [part for part in ids if part not in known]
    if strange or len(set(ids)) < len(ids):
        offered = ",".join(known) or "none, this machine has no accelerator"
        raise LaunchError(f"gpu_ids is {config.gpu_ids!r}; expected all, or different ones of: {offered}")
    return ids


def _shared_env(config: AccelConfig, host: HostFacts, *, local: int, env: Mapping[str, str]) -> dict[str, str]:
    shared = {DOCUMENT_VARIABLE: config.to_document(), **config.variables()}
    if config.tpu:
        shared |= {"PJRT_DEVICE": env.get("PJRT_DEVICE") or "TPU", **_named(config.env)}
    if config.log_level is not None:
        # Loggers may be made before any Accelerator reads the document, or without an Accelerator.
        shared["ACCEL_LOG_LEVEL"] = config.log_level
    threads = config.num_cpu_threads_per_process
    if threads is None and local > 1 and not env.get("OMP_NUM_THREADS"):
        # By default each process would use one thread for every core of the machine.
        threads = max(1, host.num_cores // local)
    if threads is not None:
        shared["OMP_NUM_THREADS"] = str(threads)
    if host.interface is not None and not env.get("GLOO_SOCKET_IFNAME"):
        # gloo's default is the interface of the host's own name, which is often the loopback interface.
        shared["GLOO_SOCKET_IFNAME"] = host.interface
    ids = _gpu_ids(config, host)
    if ids is not None and host.accelerator is not None:
        variable = _VISIBLE_DEVICES.get(host.accelerator)
        if variable is None:
            raise LaunchError(f"gpu_ids is {config.gpu_ids!r}, but {host.accelerator} devices cannot be chosen so")
        by_hip = host.accelerator == "cuda" and any(env.get(name) for name in _OF_AMD)
        for name in (variable, *_OF_AMD[:by_hip]):
            # The indices refer to the devices visible to the launcher.
            visible = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
            if not visible or len(visible) >= host.num_accelerators:
                shared[name] = ",".join(visible[int(index)] if visible else index for index in ids)
    return shared


def _direct_argv(config: AccelConfig, program: Sequence[str], host: HostFacts) -> tuple[str, ...]:
    return (*python_words(config, host.python), *program)


def python_words(config: AccelConfig, python: str) -> tuple[str, ...]:
    """Words before the program in the command of a process that no worker of this package surrounds."""
    if config.no_python:
        return ()
    compat = ("-m", "accel.compat") if config.compat else ()
    return (python, *compat, *(("-m",) if config.module else ()))


def _worker_argv(config: AccelConfig, program: Sequence[str], host: HostFacts) -> tuple[str, ...]:
    kind = "command" if config.no_python else "module" if config.module else "script"
    if config.compat:
        kind = f"{COMPAT}{kind}"
    # -P: modules in the current folder cannot shadow those of the child's main module.
    return (host.python, "-P", "-m", _WORKER, kind, *program)
