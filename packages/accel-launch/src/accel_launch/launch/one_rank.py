"""One rank of many: the process of ``accel launch --dry_run --as N --rank R``, without other ranks or a network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from accel_launch.config.model import AccelConfig, settings
from accel_launch.launch.checks import check_settings, machine_range
from accel_launch.launch.execute import become
from accel_launch.launch.host import HostFacts, check_program, read_host
from accel_launch.launch.launch_plan import ProcessPlan, plan
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.errors import LaunchError

_RUNNER = "accel.observe.one_rank"
_STARTERS = ("slurm", "hostfile", "mpirun_hostfile", "deepspeed_hostfile", "tpu_cluster")
_OMITTED = "omit it"
_UNABLE = {
    **dict.fromkeys(_STARTERS, ("it starts processes on other machines", _OMITTED)),
    "no_python": ("only a Python script can be observed", _OMITTED),
    "compat": ("its Accelerator would train and write files, because accel's own is observed", _OMITTED),
    "tpu": ("XLA connects the machines by itself", "--use_fsdp"),
    "use_deepspeed": ("DeepSpeed opens process groups by itself", "--use_fsdp"),
    "use_megatron_lm": ("Megatron-LM opens process groups by itself", "--use_fsdp"),
}
_SUPERVISED = ("log_dir", "tee", "prefix_output", "max_restarts")
"""Settings of the launcher's supervision, which one process that replaces the launcher does not have."""


def run_one_rank(
    config: AccelConfig, program: Sequence[str], env: Mapping[str, str], *, rank: int, world_size: int, as_json: bool
) -> NoReturn:
    """Replaces this process by rank ``rank`` of ``world_size``.

    Raises:
        LaunchError: a setting that one process without others cannot carry out, settings that contradict it, or a rank
            that is not below ``world_size``.
    """
    host = read_host(_alone(config))
    one = plan_one_rank(config, program, host, env=env, rank=rank, world_size=world_size, as_json=as_json)
    become(one.argv, one.environment(env))


def plan_one_rank(
    config: AccelConfig,
    program: Sequence[str],
    host: HostFacts,
    *,
    env: Mapping[str, str],
    rank: int = 0,
    world_size: int,
    as_json: bool = False,
) -> ProcessPlan:
    """Plans the process of a rank; ``num_machines`` says over how many nodes the ranks are spread, as by torchrun.

    Raises:
        LaunchError: see ``run_one_rank``.
    """
    if not 0 <= rank < world_size:
        near = min(max(rank, 0), world_size - 1)
        raise LaunchError(f"rank {rank}: ranks of {world_size} are 0 to {world_size - 1}; nearest: {near}")
    for name, (reason, nearest) in _UNABLE.items():
        if name in settings() and config.is_on(name):
            raise LaunchError(f"as {world_size} and {name}: {reason}; nearest: {nearest}, or --dry_run without --as")
    for name in _SUPERVISED:
        # Files and variables hold settings of all launches of a project.
        if config.origin(name).source in ("call", "flag") and getattr(config, name) != settings()[name].default:
            raise LaunchError(f"as {world_size} and {name}: one process has no supervisor; nearest: {_OMITTED}")
    nodes = machine_range(config)[1]
    if config.num_processes not in (None, world_size):
        raise LaunchError(f"as {world_size} and num_processes {config.num_processes} contradict each other; drop one")
    if world_size % nodes:
        raise LaunchError(
            f"as {world_size}: so many ranks cannot be spread evenly over {nodes} machines; nearest that can: "
            f"{max(1, world_size // nodes) * nodes}"
        )
    alone = _alone(config)
    check_settings(alone)
    check_program(alone, program)
    (process,) = plan(alone, program, host, env=env).processes
    kind = "module" if config.module else "script"
    form = "json" if as_json else "text"
    node, local_rank = divmod(rank, world_size // nodes)
    place = {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_PORT": str(config.main_process_port or DEFAULT_PORT),
        # Otherwise torch's profiler, which measures the peak on CPUs, prints its start and stop (level 5, USDT).
        "KINETO_LOG_LEVEL": env.get("KINETO_LOG_LEVEL", "6"),
    }
    argv = (host.python, "-P", "-m", _RUNNER, str(rank), str(world_size), form, kind, *program)
    return ProcessPlan(rank, local_rank, argv, {**process.env, **place}, process.unset)


def _alone(config: AccelConfig) -> AccelConfig:
    """The settings of a process that no other one joins."""
    return replace(
        config, num_processes=1, num_machines=1, nnodes=None, machine_rank=0, multi_gpu=False, max_restarts=0
    )
