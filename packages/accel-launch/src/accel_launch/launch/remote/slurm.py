"""Launch as a Slurm batch job: the script and its submission."""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from accel_launch.config.model import AccelConfig
from accel_launch.launch.checks import machine_range
from accel_launch.launch.remote.remote_command import launcher_argv
from accel_launch.preemption.exit_status import PREEMPTED_STATUS
from accel_state.errors import LaunchError

_WHERE = {
    "machine_rank": None,
    "main_process_ip": None,
    "main_process_port": None,
    "num_machines": None,
    "nnodes": None,
}


@final
@dataclass(frozen=True, slots=True)
class SlurmPlan:
    """An sbatch script, its path, and the command that submits it."""

    script: str
    path: str
    argv: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return {"script": self.script, "path": self.path, "argv": list(self.argv)}

    def __str__(self) -> str:
        return self.script


def plan_slurm(config: AccelConfig, program: Sequence[str]) -> SlurmPlan:
    """Plans one launcher on each node of the job; the launchers start the processes and restart them together.

    Raises:
        LaunchError: ``slurm_args`` hold something that is not an option.
    """
    few, many = machine_range(config)
    name = re.sub(r"[^\w.-]+", "_", Path(program[0]).stem) or "accel"
    options = [f"--job-name={name}", f"--nodes={few}" if few == many else f"--nodes={few}-{many}"]
    options += ["--ntasks-per-node=1", "--open-mode=append", "--requeue", *_more(config.slurm_args)]
    place = 'accel_place=(--machine_rank "$SLURM_NODEID" --num_machines "$SLURM_NNODES")'
    meeting = '(( SLURM_NNODES == 1 )) || accel_place+=(--main_process_ip "$1" --main_process_port "$2")'
    command = launcher_argv(config, program, instead=_WHERE)
    body = f'{place}; {meeting}; exec {shlex.join(command[:4])} "${{accel_place[@]}}" {shlex.join(command[4:])}'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        "# One launcher on each machine; they meet on the first one.",
        # Uses the address that Slurm itself uses, because a node's name may be unknown to the other nodes.
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        """address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')""",
        _port(config),
        "# From 22.05 until 23.11, srun gives a launcher one core unless it is told the number again.",
        '[[ -z $SLURM_CPUS_PER_TASK ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        f'srun --kill-on-bad-exit=0 bash -c {shlex.quote(body)} accel "${{address:-$first}}" "$port"',
        "status=$?",
        "",
        "# A run whose time is over has saved itself, and goes on when the job runs again. Not one that was cancelled;",
        "# what Slurm has preempted it requeues itself. In either case the job is not running any more.",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        f'if (( status == {PREEMPTED_STATUS} )) && [[ $(squeue -h -j "$job" -o %T) == RUNNING ]]; then',
        '  scontrol requeue "$job"',
        "fi",
        'exit "$status"',
    ]
    path = config.slurm_script or f"accel_{name}.sbatch"
    return SlurmPlan("\n".join(lines) + "\n", path, ("sbatch", path))


def submit(plan: SlurmPlan) -> int:
    """Writes the script, submits it and prints Slurm's output; returns the exit status of sbatch.

    Raises:
        LaunchError: the script cannot be written, or sbatch is not installed.
    """
    try:
        Path(plan.path).write_text(plan.script, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write slurm_script {plan.path!r}: {error.strerror}") from error
    try:
        return subprocess.run(plan.argv, check=False).returncode
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(plan.path).unlink()
        raise LaunchError(f"cannot run sbatch: {error.strerror}; --dry_run prints the script") from error


def _more(text: str | None) -> list[str]:
    words = shlex.split(text or "")
    options: list[str] = []
    for word in words:
        if word.startswith("-"):
            options.append(_quoted(word))
        elif options:
            options[-1] += f" {_quoted(word)}"
        else:
            raise LaunchError(f"slurm_args begin with {word!r}; expected options of sbatch, like --partition=gpu")
    return options


def _quoted(word: str) -> str:
    """Quotes a word for sbatch, which reads quotes as a shell does, but backslashes also within them."""
    return shlex.quote(word).replace("\\", "\\\\")


def _port(config: AccelConfig) -> str:
    if config.main_process_port:
        return f"port={config.main_process_port}"
    return "port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs on one machine rarely meet"
