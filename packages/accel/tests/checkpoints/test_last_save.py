"""A last save in the background that comes to nothing is known by the exit status of every rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys, threading
import torch
import torch.distributed as dist
from accel import Accelerator
from accel_ckpt.saving import transaction as saving

accelerator = Accelerator(cpu=True, strategy={strategy!r})
model = accelerator.prepare(torch.nn.Linear(16, 16))
destroyed = threading.Event()
write = saving.SaveTransaction._write

def after_the_end(self, *arguments):
    if {fails}:
        if accelerator.process_index == 1:
            raise OSError("the disk is on fire")
    else:
        assert destroyed.wait(60)
    return write(self, *arguments)

saving.SaveTransaction._write = after_the_end
accelerator.save_state({folder!r}, asynchronous=True)
if not {fails}:
    dist.destroy_process_group()
    destroyed.set()
sys.exit(0)
"""


def statuses(folder: Path, *, strategy: str, fails: bool) -> list[tuple[int, str]]:
    """Exit status and errors of two ranks, started as a scheduler would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = TRAIN.format(folder=str(folder / "one"), strategy=strategy, fails=fails)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=180)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_failure_of_one_rank_is_in_the_status_of_all(tmp_path: Path, strategy: str) -> None:
    for status, said in statuses(tmp_path, strategy=strategy, fails=True):
        assert status == 120, said
        assert "the disk is on fire; no checkpoint was committed; the process ends" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_group_that_the_script_destroys_too_early_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for status, said in statuses(tmp_path, strategy="ddp", fails=False):
        assert status == 120, said
        assert "or the process group was destroyed" in said
        assert "no checkpoint was committed" in said
    assert list(tmp_path.iterdir()) == []
