"""Launch on the machines of a hostfile: a launcher on each, started over SSH, that ends with its connection."""

import math
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from accel_launch.config.model import AccelConfig
from accel_launch.launch.remote.hostfile import Machine
from accel_launch.launch.remote.remote_command import forwarded, launcher_argv
from accel_launch.launch.supervisor.interrupts import Interrupts
from accel_launch.launch.supervisor.output import say
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_launch.launch.supervisor.supervisor import interrupted
from accel_launch.preemption.exit_status import PREEMPTED_STATUS
from accel_state.errors import LaunchError

# Extra seconds for the remote launchers, which end their processes within the grace period, to notice and report.
_MORE_GRACE = 10.0
_LOST = 255  # exit status of ssh when the connection fails


@final
@dataclass(frozen=True, slots=True)
class SshPlan:
    """The ssh command of each machine, by the machine's name."""

    machines: tuple[tuple[str, tuple[str, ...]], ...]
    num_processes: int
    grace: float

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return {
            "machines": [{"name": name, "argv": list(argv)} for name, argv in self.machines],
            "num_processes": self.num_processes,
        }

    def __str__(self) -> str:
        return "\n".join(f"# {name}\n{shlex.join(argv)}\n" for name, argv in self.machines)


def plan_ssh(
    config: AccelConfig, program: Sequence[str], machines: Sequence[Machine], *, folder: str, env: Mapping[str, str]
) -> SshPlan:
    """Plans one launcher for each machine, in the same folder and with the same Python as here.

    Raises:
        LaunchError: the machines would have different numbers of processes.
    """
    counts = {machine.num_processes for machine in machines}
    if config.num_processes is not None:
        counts = {config.num_processes // len(machines)}
        if config.num_processes % len(machines):
            raise LaunchError(
                f"num_processes is {config.num_processes}, which {len(machines)} machines cannot share; nearest that "
                f"can: {max(1, config.num_processes // len(machines)) * len(machines)}"
            )
    if len(counts) > 1:
        listed = ", ".join(f"{machine.name} {machine.num_processes or 'none given'}" for machine in machines)
        raise LaunchError(f"all machines need the same number of slots; the hostfile has: {listed}")
    (each,) = counts
    ip, port = config.main_process_ip or machines[0].name, config.main_process_port or DEFAULT_PORT
    made = []
    for rank, machine in enumerate(machines):
        where: dict[str, str | None] = {"num_machines": str(len(machines)), "machine_rank": str(rank), "nnodes": None}
        if len(machines) > 1:
            where |= {"main_process_ip": ip, "main_process_port": str(port)}
        if each is not None:
            where["num_processes"] = str(each * len(machines))
        if machine.gpu_ids is not None:
            where["gpu_ids"] = ",".join(map(str, machine.gpu_ids))
        command = launcher_argv(config, program, instead={**where, "end_with_stdin": "true"})
        variables = [f"{name}={value}" for name, value in forwarded(env).items()]
        remote = f"cd {shlex.quote(folder)} && exec env {shlex.join([*variables, *command])}"
        options = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *shlex.split(config.ssh_args or ""))
        made.append((machine.name, ("ssh", *options, machine.name, remote)))
    return SshPlan(tuple(made), (each or 0) * len(machines), config.grace_period.total_seconds())


def run_ssh(plan: SshPlan) -> int:
    """Starts all launchers and returns the exit status of the first that failed; a signal here ends them all.

    A launcher that failed at its start (no such script there) cannot tell the others, which would wait for it until
    ``join_timeout``: they are ended if they do not end soon.

    Raises:
        LaunchError: ssh is not installed.
    """
    with Interrupts() as interrupts:
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, argv in plan.machines:
                running[name] = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
            statuses = _wait(running, interrupts, patience=plan.grace + _MORE_GRACE)
        except OSError as error:
            raise LaunchError(f"cannot run ssh: {error.strerror}") from error
        finally:
            _end(running, plan.grace + _MORE_GRACE)
        if interrupts.received:
            return interrupted(interrupts.received[0], plan.num_processes or len(running))
    for name, status in statuses:
        if status == _LOST:
            say(f"accel launch: the connection to {name} failed")
    return next((abs(status) for _, status in statuses if status), 0)


def _wait(
    running: Mapping[str, "subprocess.Popen[bytes]"], interrupts: Interrupts, *, patience: float
) -> list[tuple[str, int]]:
    """Names and exit statuses in order of exit; stops waiting after a lost connection, and soon after a failure."""
    ended: list[tuple[str, int]] = []
    deadline = math.inf
    while len(ended) < len(running) and not interrupts.received:
        failed = [one for one in ended if one[1] not in (0, PREEMPTED_STATUS)]  # machines save where one was preempted
        if failed:
            deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            name, status = failed[0]
            say(f"accel launch: {name} ended with status {status}; ending the other machines, which wait for it")
            break
        known = {name for name, _ in ended}
        new = [(name, p.returncode) for name, p in running.items() if name not in known and p.poll() is not None]
        ended += new
        if any(status == _LOST for _, status in new):
            break
        time.sleep(0.05)
    return ended


def _end(running: Mapping[str, "subprocess.Popen[bytes]"], grace: float) -> None:
    """Closes the launchers' standard inputs, which ends them remotely, and waits; kills ssh clients that hang."""
    for process in running.values():
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + grace
    for process in running.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
