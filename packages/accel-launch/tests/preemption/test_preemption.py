"""Notices of a preemption, the consensus of all ranks, and the return of a Slurm job to the queue."""

import os
import signal
from pathlib import Path

import pytest
import torch

from accel_launch.preemption.preemption import NEVER, Notice, StopConsensus
from accel_launch.preemption.slurm_requeue import requeue


@pytest.mark.parametrize(
    ("limits", "stop"), [([3, 4, 3], 4), ([5, None, 5], None), ([2, NEVER, 2], NEVER), ([7, 7, 7], 7)]
)
def test_the_furthest_promise_decides(limits: list[int | None], stop: int | None) -> None:
    store = torch.distributed.HashStore()
    ballots = [StopConsensus(store, rank, len(limits)) for rank in range(len(limits))]
    assert ballots[1].called() is None
    ballots[0].call("told to")
    for ballot, limit in zip(ballots, limits, strict=True):
        if limit is not None:
            ballot.promise(limit)
    assert [ballot.called() for ballot in ballots] == ["told to"] * 3
    assert [ballot.outcome() for ballot in ballots] == [stop] * 3


JOB = {"SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    ("variables", "state", "asked"),
    [
        ({}, "RUNNING", None),
        (JOB, "RUNNING", "requeue 17"),
        (JOB, "COMPLETING", None),
        (JOB, "PREEMPTED", None),
        ({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}, "RUNNING", "requeue 17_1"),
    ],
    ids=["no job", "a job", "cancelled", "preempted by Slurm", "of an array"],
)
def test_a_slurm_job_is_put_back_unless_it_is_being_ended(
    variables: dict[str, str], state: str, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in (("scontrol", f'echo "$@" > {tmp_path}/asked'), ("squeue", f"echo {state}")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{does}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeue(variables) is (asked is not None)
    assert (tmp_path / "asked").exists() is (asked is not None)
    if asked is not None:
        assert (tmp_path / "asked").read_text().strip() == asked


def test_a_notice_listens_for_nothing_but_what_it_was_told() -> None:
    assert Notice(("SIGUSR1",)).numbers == (signal.SIGUSR1,)
    assert Notice().look() is None
    assert Notice(check=lambda: True).look() == "the preemption check said so"
