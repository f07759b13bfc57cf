"""Checks of settings that contradict each other, or that this version cannot satisfy."""

from importlib.util import find_spec

from accel_launch.config.model import PRECEDENCE, AccelConfig, settings
from accel_launch.launch.parallelism_degrees import degrees
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.errors import LaunchError

_LIBRARIES = {"use_deepspeed": "deepspeed"}
_STARTERS = ("slurm", "hostfile", "mpirun_hostfile", "deepspeed_hostfile", "tpu_cluster")


def check_settings(config: AccelConfig) -> None:
    """Refuses settings that contradict each other on any machine.

    Raises:
        LaunchError: settings contradict each other; names both values and what would work.
        ConfigError: degrees of parallelism are required and none is given.
    """
    if config.module and config.no_python:
        raise LaunchError("module and no_python are both set; a module needs Python, so drop one of them")
    if config.compat and config.no_python:
        raise LaunchError("compat and no_python are both set; compat needs Python, so drop one of them")
    _check_alone(config, ("cpu", "multi_gpu", "tpu"))
    _check_alone(config, tuple(_strategies()))
    _check_alone(config, _STARTERS)
    _check_needs(config)
    _check_strategy(config)
    degrees(config)
    if config.multi_gpu and config.num_processes == 1:
        raise LaunchError("multi_gpu needs 2 or more processes, num_processes is 1; drop one of them")
    _check_machines(config)
    if config.tpu:
        _check_tpu(config)


def _strategies() -> dict[str, str]:
    """Backend of each switch that requests one."""
    return {row.name: row.facts.strategy for row in settings().values() if row.facts.strategy}


def machine_range(config: AccelConfig) -> tuple[int, int]:
    """Minimum and maximum number of machines of the job."""
    if config.nnodes is None:
        return config.num_machines, config.num_machines
    few, _, many = config.nnodes.partition(":")
    return int(few), int(many or few)


def is_elastic(config: AccelConfig) -> bool:
    """Whether nodes may join and leave, or at least receive their ranks from the rendezvous."""
    few, many = machine_range(config)
    return few < many or config.rdzv_backend == "c10d"


def _check_alone(config: AccelConfig, names: tuple[str, ...]) -> None:
    on = [name for name in names if config.is_on(name)]
    if len(on) > 1:
        raise LaunchError(f"{' and '.join(on)} are both set; drop one of them")


_OF_TPU_CONFIG = ("tpu_name", "tpu_zone", "command_file", "commands")  # read from the same file by accel tpu-config


def _check_needs(config: AccelConfig) -> None:
    """Refuses an option without effect, unless its source is weaker than the one that turns it off."""
    for row in settings().values():
        needed = row.facts.needs
        if not needed or not config.is_given(row.name) or config.is_on(needed):
            continue
        origin, name = config.origin(row.name), needed.partition("=")[0]
        switch = config.origin(name)
        # A variable may be meant for a plugin that the script makes.
        if origin.source == "env" or getattr(config, row.name) == row.default:
            continue
        weaker = PRECEDENCE.index(origin.source) > PRECEDENCE.index(switch.source)
        if weaker or (origin.source == "file" and (switch.source == "file" or row.name in _OF_TPU_CONFIG)):
            continue
        shown = needed if "=" in needed or not settings()[name].is_switch else f"--{needed}"
        raise LaunchError(f"{row.name} ({origin}) means nothing without {shown}; add that, or drop {row.name}")


def _check_strategy(config: AccelConfig) -> None:
    """Refuses a strategy that no installed package has, or that contradicts ``backend``."""
    if config.backend not in (None, "auto"):
        from importlib.metadata import entry_points

        names = sorted({entry.name for entry in entry_points(group="accel.backends")})
        if config.backend not in names:
            raise LaunchError(
                f"backend is {config.backend!r} ({config.origin('backend')}), which is not installed; there are: auto, "
                f"{', '.join(names)}"
            )
    for switch, name in _strategies().items():
        if not getattr(config, switch):
            continue
        if config.backend is not None and not config.backend.startswith(name):
            raise LaunchError(f"{switch} and backend={config.backend} contradict each other; drop one of them")
        if name != "fsdp":
            from importlib.metadata import entry_points

            others = sorted({entry.name for entry in entry_points(group="accel.backends")})
            if name not in others:
                raise LaunchError(f"{switch}: no backend {name!r} is installed; there are: {', '.join(others)}")
        library = _LIBRARIES.get(switch)
        if library is not None and find_spec(library) is None:
            raise LaunchError(
                f"{switch} needs the library {library!r}, which is not installed here: pip install {library}"
            )


def _check_tpu(config: AccelConfig) -> None:
    """Refuses numbers of processes and choices of devices on TPUs, where one process drives all cores of a machine."""
    few, many = machine_range(config)
    if config.tpu_cluster and (config.is_given("num_machines") or config.nnodes is not None):
        raise LaunchError("tpu_cluster: each machine of a pod knows how many they are; drop num_machines and nnodes")
    if few < many:
        raise LaunchError(f"nnodes is {config.nnodes}, but the machines of a TPU pod neither come nor go; say {many}")
    if config.num_processes not in (None, 1, many):
        raise LaunchError(
            f"num_processes is {config.num_processes} ({config.origin('num_processes')}): one process drives all TPU "
            f"cores of a machine; drop it, or say num_processes {many}"
        )
    if config.gpu_ids not in (None, "all"):
        raise LaunchError(f"tpu uses all cores of a machine, and gpu_ids is {config.gpu_ids!r}; drop gpu_ids")
    if config.downcast_bf16 and config.mixed_precision != "bf16":
        raise LaunchError(
            f"downcast_bf16 means nothing with mixed_precision {config.mixed_precision!r}; add mixed_precision bf16"
        )


def _check_machines(config: AccelConfig) -> None:
    few, many = machine_range(config)
    if config.nnodes is not None and config.is_given("num_machines") and not few <= config.num_machines <= many:
        raise LaunchError(f"nnodes is {config.nnodes} and num_machines {config.num_machines}; drop num_machines")
    if few > many:
        raise LaunchError(f"nnodes is {config.nnodes}: the first number is how few machines, the second how many")
    if config.rdzv_conf is not None and not is_elastic(config):
        raise LaunchError("rdzv_conf means nothing to machines with given ranks; add --rdzv_backend c10d, or drop it")
    # DeepSpeed's hostfile determines the number of machines; the plan made from it is checked again.
    if not is_elastic(config) and config.deepspeed_hostfile is None and config.machine_rank >= many:
        raise LaunchError(f"machine_rank is {config.machine_rank} of num_machines {many}; expected 0 to {many - 1}")
    started_from_here = any(config.is_on(name) for name in _STARTERS)
    if many > 1 and not started_from_here:
        if not config.main_process_ip:
            raise LaunchError(
                f"{many} machines need main_process_ip, the same on each: an address of machine 0, where port "
                f"{config.main_process_port or DEFAULT_PORT} is free"
            )
        if config.main_process_port == 0:
            raise LaunchError(
                f"main_process_port is 0, a free port, which {many} machines cannot know of each other; give the same "
                f"number on each, or leave it out for {DEFAULT_PORT}"
            )
    total = config.num_processes
    if total is not None and total % many:
        below, above = total // many * many, (total // many + 1) * many
        raise LaunchError(
            f"num_processes counts all machines: {total} cannot be shared by {many} machines; "
            f"nearest that can: {below or above}"
        )
