"""Machines that come and go: ``--nnodes 1:4`` over real launchers, one of which is killed or comes late."""

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel_launch.launch.multi_node.elastic import _is_mine, options_of
from accel_state.errors import LaunchError
from accel_testing.ranks.launchers import free_port

# Counts to ten, one number a step; what has been counted is in a file. The number of processes is told at each step.
# With a file ``hold``, one machine alone waits for another to join it, and two stay at five.
COUNT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
begun = int(open("count").read()) if os.path.exists("count") else 0
start = torch.tensor([begun]); dist.broadcast(start, 0)
open(f"began_{attempt}_{world}_{rank}", "w").close()
step = int(start)
while step < 10 or (os.environ.get("WAIT") and world != int(os.environ["WAIT"])):
    total = torch.ones(1); dist.all_reduce(total)
    assert total.item() == world
    step += 1
    if rank == 0:
        with open("staged", "w") as file: file.write(str(step))
        os.replace("staged", "count")
    time.sleep(0.05)
    while os.path.exists("hold") and (world == 1 or step == 5): time.sleep(0.05)
dist.barrier()
print(f"rank {rank} of {world} counted to {step}", flush=True)
dist.destroy_process_group()
"""


def wait_until(done: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def elastic(folder: Path, port: int, **env: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher at each call, with more flags if any; what is left at the end is killed."""
    (folder / "count.py").write_text(COUNT)
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--nnodes", "1:4", "--num_processes", "4"]
    argv += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--max_restarts", "3"]
    argv += ["--rdzv_conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"]
    argv += ["--grace_period", "2"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL", "TORCHELASTIC"))}
    made: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        made.append(
            subprocess.Popen(
                [*argv, *flags, "count.py"],
                cwd=folder,
                env=clean | {"OMP_NUM_THREADS": "1"} | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return made[-1]

    try:
        yield start
    finally:
        for process in made:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # its guard ends the rest
            process.communicate()


def began(folder: Path, world: int) -> bool:
    return len(list(folder.glob(f"began_*_{world}_*"))) >= world


def test_the_others_go_on_when_a_machine_is_lost(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "hold").touch()
    with elastic(tmp_path, port) as start:
        # Told which machine keeps the store, both may start at once.
        first, second = (start("--machine_rank", str(rank)) for rank in range(2))
        wait_until(lambda: (tmp_path / "count").exists() and (tmp_path / "count").read_text() == "5", "no two machines")
        second.send_signal(signal.SIGKILL)
        (tmp_path / "hold").unlink()
        out, err = first.communicate(timeout=200)
    assert first.returncode == 0, err
    assert out.splitlines()[-1] == "rank 0 of 1 counted to 10", err


@pytest.mark.slow
def test_a_machine_that_comes_late_joins(tmp_path: Path) -> None:
    port = free_port()
    with elastic(tmp_path, port, WAIT="2") as start:
        first = start()
        wait_until(lambda: began(tmp_path, 1), "the first machine does not begin alone")
        second = start()
        outputs = [process.communicate(timeout=200) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    lines = sorted(line.rpartition(" counted")[0] for out, _ in outputs for line in out.splitlines())
    assert lines == ["rank 0 of 2", "rank 1 of 2"]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "words"),
    [("last_call_timout=3", "did you mean last_call_timeout"), ("last_call_timeout=soon", "=NUMBER"), ("x", "known:")],
)
def test_a_wrong_option_of_the_meeting_is_named(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        options_of(text)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_machine_of_an_address_holds_the_store_while_the_port_is_free(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as other:
        try:
            other.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        port = other.getsockname()[1]
        other.listen(1)
        assert not _is_mine(address, port)
    assert _is_mine(address, port)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_another_machine_does_not_hold_it(address: str) -> None:
    assert not _is_mine(address, free_port())


# Trains on a fixed global batch and saves after every step; what every step has seen and cost is told by rank 0.
TRAIN = """
import os, time, torch
from accel import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(global_batch_size=8), project_dir="run")
x = torch.randn(96, 4, dtype=torch.float64)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
step = 0
if os.path.exists("run/latest"):
    where = open("run/latest").read()
    accelerator.load_state(where)
    step = int(where.rpartition("_")[2])
for features, target in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(features), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if not accelerator.sync_gradients:
        continue
    step += 1
    accelerator.save_state(f"run/step_{step}")
    if accelerator.is_main_process:
        weights = [p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
        with open(f"trace_{step}", "w") as file:
            file.write(repr((accelerator.num_processes, sum(weights, []))))
        with open("staged", "w") as file: file.write(f"run/step_{step}")
        os.replace("staged", "run/latest")
    while os.path.exists("hold") and (accelerator.num_processes == 1 or step == 5):
        time.sleep(0.05)
accelerator.end_training()
"""


@pytest.mark.slow
def test_training_goes_on_exactly_when_a_machine_is_lost(tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "train.py"]
    subprocess.run(argv, cwd=whole, check=True, timeout=240)
    port = free_port()
    (lost / "hold").touch()
    with elastic(lost, port) as start:
        (lost / "count.py").write_text(TRAIN)
        first = start()
        wait_until(lambda: _listens(port), "nobody keeps the store")
        second = start()
        wait_until((lost / "trace_5").exists, "no two machines")
        second.send_signal(signal.SIGKILL)
        (lost / "hold").unlink()
        _, said = first.communicate(timeout=200)
    assert first.returncode == 0, said
    steps = range(1, 13)
    traces = {
        folder.name: [ast.literal_eval((folder / f"trace_{step}").read_text()) for step in steps]
        for folder in (whole, lost)
    }
    assert {world for world, _ in traces["lost"]} == {1, 2}
    for (_, expected), (_, found) in zip(traces["whole"], traces["lost"], strict=True):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
