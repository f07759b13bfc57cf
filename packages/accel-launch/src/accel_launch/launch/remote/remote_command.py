"""Command line of a launcher on another machine: this launch again, with that machine's rank."""

import sys
from collections.abc import Mapping, Sequence

from accel_launch.config.model import AccelConfig, settings

_STARTING = (
    "slurm",
    "slurm_script",
    "slurm_args",
    "hostfile",
    "ssh_args",
    "mpirun_hostfile",
    "mpirun_args",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
)
_FORWARDED = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "TORCH_", "PYTHONPATH", "CUDA_", "LD_LIBRARY_PATH")


def launcher_argv(
    config: AccelConfig, program: Sequence[str], *, instead: Mapping[str, str | None], python: str = sys.executable
) -> list[str]:
    """``accel launch`` with every given setting, from any source, as a flag.

    ``instead`` replaces settings by texts, or omits them (None). Settings that need one which is off are left out: in a
    file or a variable they are passed over, as flags they would be refused.
    """
    argv = [python, "-m", "accel", "launch"]
    for row in settings().values():
        if row.name in instead or row.name in _STARTING or not config.is_given(row.name):
            continue
        value = getattr(config, row.name)
        if value is None or value == row.default or (row.facts.needs and not config.is_on(row.facts.needs)):
            continue
        if row.is_switch:
            argv.append(f"--{row.name}" if value else f"--no_{row.name}")
        else:
            argv += [f"--{row.name}", row.text(value)]
    for name, text in instead.items():
        if text is not None:
            argv += [f"--{name}"] if settings()[name].is_switch else [f"--{name}", text]
    return [*argv, *(("--",) if program[0].startswith("-") else ()), *program]


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Variables to forward to a process on another machine: those of libraries, without secrets."""
    return {name: value for name, value in sorted(env.items()) if name.startswith(_FORWARDED)}
