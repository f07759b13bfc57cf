"""Launch through mpirun, which starts the processes on all machines."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from accel_launch.config.model import DOCUMENT_VARIABLE, AccelConfig
from accel_launch.launch.launch_plan import python_words
from accel_launch.launch.remote.hostfile import Machine
from accel_launch.launch.remote.remote_command import forwarded
from accel_state.errors import LaunchError

Flavour = Literal["openmpi", "hydra"]


@final
@dataclass(frozen=True, slots=True)
class MpiPlan:
    """mpirun's command, and the variables that are added to the launcher's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    num_processes: int

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return {"argv": list(self.argv), "env": dict(self.env), "num_processes": self.num_processes}

    def __str__(self) -> str:
        variables = "".join(f"{name}={shlex.quote(value)} \\\n" for name, value in self.env.items())
        return f"# {self.num_processes} processes, started by mpirun\n{variables}{shlex.join(self.argv)}\n"


def plan_mpi(
    config: AccelConfig,
    program: Sequence[str],
    machines: Sequence[Machine],
    *,
    hostfile: str,
    flavour: Flavour,
    env: Mapping[str, str],
) -> MpiPlan:
    """Plans the mpirun command of ``program`` on ``machines``; the processes read their ranks from its variables."""
    slots = sum(machine.num_processes or 1 for machine in machines)
    total = config.num_processes or slots
    each = str(max(1, total // len(machines)))
    own = {DOCUMENT_VARIABLE: config.to_document(), **config.variables()}
    if config.main_process_ip:
        own["MASTER_ADDR"] = config.main_process_ip
    if config.main_process_port:
        own["MASTER_PORT"] = str(config.main_process_port)
    if config.num_cpu_threads_per_process is not None:
        own["OMP_NUM_THREADS"] = str(config.num_cpu_threads_per_process)
    more = tuple(shlex.split(config.mpirun_args or ""))
    names = {**forwarded(env), **own}
    if flavour == "openmpi":
        where = ("--hostfile", hostfile, "-n", str(total), "--npernode", each, *more)
        handed = tuple(word for name in names for word in ("-x", name))
    else:
        where = ("-f", hostfile, "-n", str(total), "-ppn", each, *more)
        handed = tuple(word for name, value in names.items() for word in ("-genv", name, value))
    python = python_words(config, sys.executable)
    return MpiPlan(("mpirun", *where, *handed, *python, *program), own, total)


def mpi_flavour() -> Flavour:
    """Detects the mpirun on the path: Open MPI's, or one of the MPICH family (Intel MPI, MVAPICH) with other options.

    Raises:
        LaunchError: there is no mpirun, or its version output is unknown.
    """
    tool = shutil.which("mpirun")
    if tool is None:
        raise LaunchError("mpirun_hostfile is set and there is no mpirun on the PATH; install Open MPI or MPICH")
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{tool} --version failed: {error}") from error
    if "Open MPI" in said or "OpenRTE" in said:
        return "openmpi"
    if any(word in said for word in ("HYDRA", "Intel", "mpich", "MPICH", "mvapich", "MVAPICH")):
        return "hydra"
    raise LaunchError(
        f"{tool} is of no known kind: {said.splitlines()[:1]}; expected Open MPI, MPICH, Intel or MVAPICH"
    )


def become_mpirun(plan: MpiPlan) -> None:
    """Replaces this process by mpirun, which ends its processes itself and returns their status.

    Raises:
        LaunchError: mpirun cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(plan.argv[0], plan.argv, {**os.environ, **plan.env})
    except OSError as error:
        raise LaunchError(f"cannot run mpirun: {error.strerror}") from error
