"""Requeueing of a Slurm job after it has saved itself."""

import logging
import os
import subprocess
from collections.abc import Mapping

_LOG = logging.getLogger(__name__)


def requeue(env: Mapping[str, str] | None = None) -> bool:
    """Requeues this Slurm job; returns False if there is none, or the job is being cancelled.

    Reads ``SLURM_ARRAY_JOB_ID``, ``SLURM_ARRAY_TASK_ID`` and ``SLURM_JOB_ID`` of ``os.environ`` unless ``env`` is
    given. A cancelled job stays cancelled. A job submitted with ``--no-requeue`` cannot be requeued; that is logged.
    """
    variables = os.environ if env is None else env
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return False
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else job
    state = _asked("squeue", "--noheader", "--job", name, "--format", "%T")
    if state is not None and state != "RUNNING":
        _LOG.info("job %s is %s and was not requeued", name, state or "gone")
        return False
    return _asked("scontrol", "requeue", name) is not None


def _asked(*argv: str) -> str | None:
    """Output of a Slurm command; None if it fails, which is logged."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _LOG.warning("%s: %s", " ".join(argv), error)
        return None
    if done.returncode:
        _LOG.warning("%s: %s", " ".join(argv), done.stderr.strip())
    return None if done.returncode else done.stdout.strip()
