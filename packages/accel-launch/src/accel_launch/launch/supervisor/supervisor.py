"""Execution of a plan on one machine, attempt after attempt, without torch."""

import os
import signal
import uuid
from pathlib import Path

from accel_launch.launch.launch_plan import LaunchPlan
from accel_launch.launch.supervisor.child_processes import Workers
from accel_launch.launch.supervisor.failure import Failure, report
from accel_launch.launch.supervisor.interrupts import FOR_PROCESSES, Interrupts
from accel_launch.launch.supervisor.orphan_reaper import Guard
from accel_launch.launch.supervisor.output import Output, say
from accel_launch.launch.supervisor.ports import reserved_port
from accel_launch.preemption.exit_status import PREEMPTED_STATUS

_STOPPED_BY_SIGNAL = 128


def run_local(plan: LaunchPlan) -> int:
    """Runs the processes of ``plan`` until all succeed or no restarts are left; returns the exit status.

    Every attempt has its own port, unless a port was given, and rank 0 opens the store on it. So a restart never sees
    store entries of an earlier attempt, which make restarts fail if the launcher keeps one store for all attempts.
    """
    config = plan.config
    run_id = uuid.uuid4().hex
    with Interrupts(FOR_PROCESSES) as interrupts, Guard() as guard:
        attempt = 0
        while True:
            workers = Workers(
                folder=_fresh(guard.folder / str(attempt)),
                output=output_of(plan, attempt),
                interrupts=interrupts,
                guard=guard,
            )
            failures = _attempt(plan, workers, interrupts, attempt_env(plan, attempt, run_id))
            if workers.preempted and not failures:
                return preempted(len(plan.processes))
            if interrupts.received:
                return interrupted(interrupts.received[0], len(plan.processes))
            if not failures:
                return 0
            last = attempt == config.max_restarts
            if last or not config.quiet:
                say(report(failures, plan.num_processes, quiet=config.quiet))
            if last:
                return failures[0].status or 1
            attempt += 1
            if not config.quiet:
                say(f"accel launch: starting all processes again (restart {attempt} of {config.max_restarts})")


# Prefix of the file of each rank, to which torch adds the rank: its name in torch 2.13, and its older one.
_DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def attempt_env(plan: LaunchPlan, attempt: int, run_id: str) -> dict[str, str]:
    """Torch elastic's variables, from which programs read the number of restarts, and those of NCCL's flight recorder.

    With ``log_dir``, NCCL dumps its flight recorder at a timeout beside the logs, which hold the watchdog's reports.
    What the user has set is kept.
    """
    folder = log_folder(plan, attempt)
    dumps: dict[str, str] = {}
    if folder is not None and os.environ.keys().isdisjoint(_DUMP_FILES):
        record = str(folder.absolute() / "nccl_flight_record_rank_")
        dumps = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **dict.fromkeys(_DUMP_FILES, record)}
    return {
        **{name: value for name, value in dumps.items() if name not in os.environ},
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.config.max_restarts),
        # Rank 0 opens the store itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def log_folder(plan: LaunchPlan, attempt: int) -> Path | None:
    """The folder of an attempt's logs; None without ``log_dir``."""
    return None if plan.config.log_dir is None else Path(plan.config.log_dir) / f"attempt_{attempt}"


def output_of(plan: LaunchPlan, attempt: int) -> Output | None:
    """The copier of an attempt's output; None if the processes write to the launcher's streams directly."""
    config = plan.config
    if not config.prefix_output and config.log_dir is None and config.tee == "0":
        return None
    folder = log_folder(plan, attempt)
    role = "" if config.role == "default" else config.role
    return Output(prefix=config.prefix_output, folder=folder, tee=config.tee, role=role)


def interrupted(number: signal.Signals, num_processes: int) -> int:
    """Prints which signal ended the job and returns the exit status of that signal."""
    say(f"accel launch: ended by {number.name}, and {num_processes} processes with it")
    return _STOPPED_BY_SIGNAL + number


def preempted(num_processes: int) -> int:
    """Prints that the run saved itself before it ended, and returns the exit status of a preempted run."""
    say(f"accel launch: preempted; {num_processes} processes have saved and ended")
    return PREEMPTED_STATUS


def _attempt(plan: LaunchPlan, workers: Workers, interrupts: Interrupts, env: dict[str, str]) -> list[Failure]:
    config, grace = plan.config, plan.config.grace_period.total_seconds()
    with reserved_port(plan.main_port) as port:
        try:
            workers.start(plan.processes, env | {"MASTER_PORT": str(port)})
            while workers.running and not workers.failed and not interrupts.received and not workers.stuck(grace):
                workers.wait(config.monitor_interval)
                if workers.preempted:
                    workers.wait_all(grace)
                    break
            if workers.running:
                number = interrupts.received[0] if interrupts.received else signal.SIGTERM
                workers.stop(number, grace)
        finally:
            workers.close()
    return workers.failures()


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)  # the one above may have been cleared away in days of training
    return folder
