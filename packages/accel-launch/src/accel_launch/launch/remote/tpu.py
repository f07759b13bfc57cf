"""Launch on TPUs: one process drives all cores of a machine (SPMD); gcloud starts it on the machines of a pod."""

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from accel_launch.config.model import AccelConfig, Origin, settings
from accel_launch.launch.launch_plan import LaunchPlan
from accel_launch.launch.remote.remote_command import launcher_argv
from accel_state.errors import LaunchError

_OF_THE_POD = ("tpu_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "vm", "command_file", "commands")
_EVERY_WORKER = "all"
REMOTE_PYTHON = "python3"


@final
@dataclass(frozen=True, slots=True)
class PodPlan:
    """The gcloud command for machines of a pod, and the plan of each machine's launcher.

    Attributes:
        argv: the gcloud command on this machine.
        worker: the machines: ``all``, or their numbers with commas.
        there: the plan that the launcher on each machine will make.
    """

    argv: tuple[str, ...]
    worker: str
    there: LaunchPlan

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        on_each = {**self.there.to_json(), "place": "that of one machine; among several, each finds its own"}
        return {"argv": list(self.argv), "workers": self.worker.split(","), "on_each": on_each}

    def __str__(self) -> str:
        place = "its place there is that of one machine; among several, each finds its own"
        here = f"# here\n{shlex.join(self.argv)}"
        return f"{here}\n\n# on each machine of the pod ({self.worker}); {place}\n{self.there}"


def settled(config: AccelConfig) -> AccelConfig:
    """Applies ``downcast_bf16``: parameters are bf16 too, through a precision of that name."""
    if not config.downcast_bf16:
        return config
    origins = {**config.origins, "mixed_precision": config.origin("downcast_bf16")}
    return replace(config, mixed_precision="bf16-true", downcast_bf16=False, origins=origins)


def without_pod(config: AccelConfig) -> AccelConfig:
    """Settings for each machine of a pod: all but the pod's name and zone, and the commands that run there first."""
    rows = settings()
    values: dict[str, Any] = {name: rows[name].default for name in _OF_THE_POD}
    origins = {**config.origins, **dict.fromkeys(_OF_THE_POD, Origin("default"))}
    return replace(config, origins=origins, **values)


def require_library(env: Mapping[str, str]) -> None:
    """Raises LaunchError if torch_xla is missing, because the script would train on the CPU."""
    if find_spec("torch_xla") is None:
        raise LaunchError(
            f"tpu: torch_xla is not installed here, and the program would find no {env.get('PJRT_DEVICE', 'TPU')}; "
            "install the one made for your version of torch (pip install torch==2.9.0 torch_xla==2.9.0)"
        )


def plan_pod(config: AccelConfig, program: Sequence[str], there: LaunchPlan) -> PodPlan:
    """Plans gcloud's command line for a pod; reads ``command_file``.

    Raises:
        LaunchError: no name or zone is given, or the file cannot be read.
    """
    if not (config.tpu_name and config.tpu_zone):
        raise LaunchError("tpu_cluster needs tpu_name and tpu_zone, as gcloud knows them")
    command = launcher_argv(without_pod(config), program, instead={}, python=REMOTE_PYTHON)
    sudo = "sudo " if config.tpu_use_sudo else ""
    before = pod_commands(config)
    worker = config.vm or _EVERY_WORKER
    argv = ssh_argv(config.tpu_name, config.tpu_zone, [*before, f"{sudo}{shlex.join(command)}"], worker=worker)
    return PodPlan(argv, worker, there)


def pod_commands(config: AccelConfig) -> list[str]:
    """Commands of the local file ``command_file``, one a line, and those of ``commands``.

    Raises:
        LaunchError: the file cannot be read.
    """
    lines: list[str] = []
    if config.command_file is not None:
        try:
            lines = Path(config.command_file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"cannot read command_file {config.command_file!r}: {error}") from error
    return [word for part in (*lines, *(config.commands or "").split(";")) if (word := part.strip())]


def ssh_argv(
    name: str, zone: str, commands: Sequence[str], *, worker: str = _EVERY_WORKER, alpha: bool = False
) -> tuple[str, ...]:
    """The gcloud command line that runs ``commands`` in one shell on machines of a pod."""
    gcloud = ("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh")
    return (*gcloud, name, "--zone", zone, "--command", "; ".join(commands), "--worker", worker)


def run_gcloud(argv: Sequence[str]) -> int:
    """Runs gcloud and returns its exit status.

    Raises:
        LaunchError: gcloud is not installed.
    """
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"cannot run {argv[0]!r}, which is not installed here; it would be: {shlex.join(argv)}")
    return subprocess.run(argv).returncode
