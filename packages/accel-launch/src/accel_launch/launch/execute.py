"""Execution of a plan."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from accel_launch.launch.launch_plan import LaunchPlan
from accel_launch.launch.supervisor.ports import reserved_port
from accel_state.errors import LaunchError


def run(plan: LaunchPlan) -> int:
    """Starts the processes of ``plan`` and returns the exit status; a direct plan replaces this process instead.

    Raises:
        LaunchError: the system refuses a port, a command or a folder for logs.
    """
    if plan.direct:
        _become(plan)
    if plan.config.end_with_stdin:
        from accel_launch.launch.supervisor.stdin_lifeline import end_with_stdin

        end_with_stdin()
    if plan.num_machines > 1:
        from accel_launch.launch.multi_node.node import run_machine

        return run_machine(plan)
    from accel_launch.launch.supervisor.supervisor import run_local

    return run_local(plan)


def _become(plan: LaunchPlan) -> None:
    (process,) = plan.processes
    # The reservation ends here: the process may open a process group on the port, or never use it.
    with reserved_port(plan.main_port) as port:
        env = {**process.environment(os.environ), "MASTER_PORT": str(port)}
    become(process.argv, env)


def become(argv: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a command.

    Raises:
        LaunchError: the system refuses the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise LaunchError(f"cannot run {argv[0]!r}: {error.strerror}") from error
