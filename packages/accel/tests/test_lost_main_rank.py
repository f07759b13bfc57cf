"""Rank 0 is killed or stopped while the others use its store: they end in time, and name it, without torch's stacks."""

import re
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_script

TRAIN = """
import os, signal, subprocess, sys, time
from datetime import timedelta
from pathlib import Path

how, where = sys.argv[1:]
rank, pid = int(os.environ["RANK"]), Path("pid")
if where == "distant":  # the ranks take each other for another machine's
    import socket
    socket.gethostname = lambda: f"machine{rank}"
import torch
from torch.distributed import TCPStore

def lose():
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

if rank == 0:
    pid.write_text(str(os.getpid()))
if rank == 0 and where == "opening":
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    store.wait(["accel/attempt_0/opening_1/here/1"])
    lose()

from accel import Accelerator, InitProcessGroupKwargs
from accel_state.process_group.group import sibling_group
from accel_state.collectives.objects import all_gather_object

began = time.monotonic()
try:
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=6 if where == "opening" else 600))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    accelerator.gather(torch.ones(2))
    accelerator.wait_for_everyone()
    if rank == 0 and where == "group":
        all_gather_object("the name", group=accelerator.session.group)
    if rank == 0:
        lose()
    if where == "group":
        sibling_group(accelerator.session.group)
    accelerator.gather(torch.ones(2))
finally:
    print(f"ended after {time.monotonic() - began:.1f} s", flush=True)
    if how == "stop" and rank == 1:  # so that the test ends: rank 0 is killed once this rank has ended
        wait = f"while grep -q . /proc/{os.getpid()}/cmdline; do sleep 0.1; done; kill -KILL {pid.read_text()}"
        subprocess.Popen(["sh", "-c", wait], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
_OF_TORCH = re.compile(r"frame #\d|recvValue|sendBytes|Exception raised from")
SLOW = pytest.mark.slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("kill", "opening", "rank 1 found no rank 0 at 127.0.0.1"),
        ("stop", "distant", "rank 0 has not been heard of for"),
        pytest.param("stop", "opening", "the store at 127.0.0.1:.* does not answer any more", marks=SLOW),
        pytest.param("kill", "distant", "rank 0 has not been heard of for", marks=SLOW),
        pytest.param("kill", "near", "rank 0 is dead", marks=SLOW),
        pytest.param("stop", "near", "rank 0 is stopped", marks=SLOW),
        pytest.param("kill", "group", "rank 0 is dead", marks=SLOW),
    ],
)
def test_the_others_end_in_time_and_name_it(tmp_path: Path, how: str, where: str, words: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    finished = run_script(tmp_path / "train.py", how, where, ranks=2, cwd=tmp_path)
    said = finished.outputs[1]
    assert not finished.timed_out, said
    assert finished.statuses[1] == 1, said
    assert re.search(words, said), said
    assert where == "opening" or "rank 0 will not come to" in said, said
    assert not _OF_TORCH.search(said), said
    ended = re.search(r"ended after ([\d.]+) s", said)
    assert ended is not None, said
    assert float(ended[1]) < 40, said
