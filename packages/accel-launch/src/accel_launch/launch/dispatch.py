"""Selection of the launch method: this launcher, a scheduler, mpirun, or launchers on other machines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, final

from accel_launch.config.model import AccelConfig
from accel_launch.launch.checks import check_settings
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.errors import LaunchError


class Plan(Protocol):
    """Interface of a plan of processes to start, as text and as plain data."""

    def __str__(self) -> str:
        """Text for people."""
        ...

    def to_json(self) -> dict[str, object]:
        """Plain data for programs."""
        ...


@final
@dataclass(frozen=True, slots=True)
class LaunchMethod:
    """A plan, and ``run``, which executes it and returns the exit status."""

    plan: Plan
    run: Callable[[], int]


def prepare(config: AccelConfig, program: Sequence[str], env: Mapping[str, str]) -> LaunchMethod:
    """Returns the launch method that the settings select; inspects the machine and hostfiles, and starts no process.

    Raises:
        LaunchError: the settings contradict each other, or something that they name does not exist.
    """
    from accel_launch.launch.host import check_program

    if config.tpu and not config.tpu_cluster:
        from accel_launch.launch.remote.pod import on_pod

        config = on_pod(config, env)
    check_settings(config)
    check_program(config, program)
    if config.tpu:
        return _tpu(config, program, env)
    if config.slurm:
        from accel_launch.launch.remote.slurm import plan_slurm, submit

        batch = plan_slurm(config, program)
        return LaunchMethod(batch, partial(submit, batch))
    if config.mpirun_hostfile is not None:
        return _mpi(config, program, config.mpirun_hostfile, env)
    if config.hostfile is not None:
        return _ssh(config, program, config.hostfile, env)
    if config.deepspeed_hostfile is not None:
        return _deepspeed(config, program, config.deepspeed_hostfile, env)
    return _here(config, program, env)


def _here(config: AccelConfig, program: Sequence[str], env: Mapping[str, str]) -> LaunchMethod:
    from accel_launch.launch.execute import run
    from accel_launch.launch.host import read_host
    from accel_launch.launch.launch_plan import plan

    planned = plan(config, program, read_host(config), env=env)
    return LaunchMethod(planned, partial(run, planned))


def _tpu(config: AccelConfig, program: Sequence[str], env: Mapping[str, str]) -> LaunchMethod:
    from accel_launch.launch.remote.tpu import (
        REMOTE_PYTHON,
        plan_pod,
        require_library,
        run_gcloud,
        settled,
        without_pod,
    )

    if config.tpu_cluster:
        from accel_launch.launch.host import HostFacts
        from accel_launch.launch.launch_plan import plan

        there = plan(settled(without_pod(config)), program, HostFacts(REMOTE_PYTHON, 1, None, 0), env={})
        pod = plan_pod(config, program, there)
        return LaunchMethod(pod, partial(run_gcloud, pod.argv))
    here = _here(settled(config), program, env)

    def run() -> int:
        require_library(env)
        return here.run()

    return LaunchMethod(here.plan, run)


def _mpi(config: AccelConfig, program: Sequence[str], hostfile: str, env: Mapping[str, str]) -> LaunchMethod:
    from accel_launch.launch.remote.hostfile import read_hostfile
    from accel_launch.launch.remote.mpi import become_mpirun, mpi_flavour, plan_mpi

    unable = [name for name in ("max_restarts", "prefix_output", "log_dir", "tee") if config.is_on(name)]
    if config.gpu_ids not in (None, "all"):
        unable.append("gpu_ids")
    if unable:
        raise LaunchError(f"{', '.join(unable)}: mpirun starts and watches the processes; drop {', '.join(unable)}")
    machines = read_hostfile(hostfile)
    planned = plan_mpi(config, program, machines, hostfile=hostfile, flavour=mpi_flavour(), env=env)

    def run() -> int:
        become_mpirun(planned)
        return 0  # never reached

    return LaunchMethod(planned, run)


def _ssh(config: AccelConfig, program: Sequence[str], hostfile: str, env: Mapping[str, str]) -> LaunchMethod:
    from accel_launch.launch.remote.hostfile import filtered, read_hostfile
    from accel_launch.launch.remote.ssh import plan_ssh, run_ssh

    include, exclude = config.deepspeed_inclusion_filter, config.deepspeed_exclusion_filter
    machines = filtered(read_hostfile(hostfile), include, exclude)
    planned = plan_ssh(config, program, machines, folder=str(Path.cwd()), env=env)
    return LaunchMethod(planned, partial(run_ssh, planned))


def _deepspeed(config: AccelConfig, program: Sequence[str], hostfile: str, env: Mapping[str, str]) -> LaunchMethod:
    """Maps DeepSpeed's launcher names to SSH, MPI and Slurm; ``standard`` and ``nossh`` start this machine's ranks."""
    how = config.deepspeed_multinode_launcher or "pdsh"
    if how == "openmpi":
        return _mpi(config, program, hostfile, env)
    if how in ("pdsh", "ssh"):
        return _ssh(config, program, hostfile, env)
    from dataclasses import replace

    from accel_launch.config.model import Origin
    from accel_launch.launch.remote.hostfile import filtered, read_hostfile

    machines = filtered(read_hostfile(hostfile), config.deepspeed_inclusion_filter, config.deepspeed_exclusion_filter)
    slots = sum(machine.num_processes or 1 for machine in machines)
    said = Origin("file", hostfile)
    settled = replace(
        config,
        num_machines=len(machines),
        num_processes=config.num_processes or slots,
        main_process_ip=config.main_process_ip or machines[0].name,
        main_process_port=config.main_process_port or DEFAULT_PORT,
        deepspeed_hostfile=None,
        deepspeed_multinode_launcher=None,
        deepspeed_inclusion_filter=None,
        deepspeed_exclusion_filter=None,
        origins={**config.origins, "num_machines": said},
    )
    check_settings(settled)
    return _here(settled, program, env)
