"""What the tests of the hang doctor run: three ranks of a training loop, of which rank 1 goes another way.

    python diverging_ranks.py FOLDER KIND:WHERE...

Each scenario runs in processes forked from this one, which has imported everything, and prints one line of JSON: how
each rank ended, what it said, and how many seconds after the ranks parted it was told.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from accel import Accelerator
from accel_testing.launching import free_port

RANKS, LIMIT, CULPRIT = 3, 45.0, 1


def act(accelerator: Any, model: Any, where: str, value: Any, folder: str) -> None:
    if where == "gather":
        accelerator.gather(value)  # line: gather
    elif where == "reduce":
        accelerator.reduce(value)  # line: reduce
    elif where == "broadcast":
        accelerator.session.broadcast(value)  # line: broadcast
    elif where == "barrier":
        accelerator.wait_for_everyone()  # line: barrier
    elif where == "save":
        accelerator.save_state(folder)  # line: save
    elif where == "backward":
        loss = model(torch.ones(2, 4)).sum()
        accelerator.backward(loss)  # line: backward


def part(kind: str, accelerator: Any) -> Any:
    """What rank 1 does instead; the value it goes on with."""
    if kind == "raise":
        raise ValueError("on one rank only")  # line: raise
    if kind == "exit":
        sys.exit(0)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "op":
        accelerator.pad_across_processes(torch.ones(3))  # line: op
    changed = {"shape": torch.ones(5), "dtype": torch.ones(3, dtype=torch.float64), "structure": {"a": torch.ones(3)}}
    return changed.get(kind, torch.ones(3))


def train(kind: str, where: str, folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        accelerator.gather(torch.ones(2))
        act(accelerator, model, where, torch.ones(3), f"{folder}/{step}")
    accelerator.wait_for_everyone()
    value: Any = torch.ones(3)
    began.append(time.monotonic())
    if accelerator.process_index == CULPRIT:
        value = part(kind, accelerator)
        if kind == "extra":
            act(accelerator, model, where, value, f"{folder}/extra")
    if not (accelerator.process_index == CULPRIT and kind == "skip"):
        act(accelerator, model, where, value, f"{folder}/last")
    accelerator.wait_for_everyone()  # line: end
    print("END")


began: list[float] = []


def told(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints an error as ever, and before it how long it took to come."""
    if began:
        print(f"TOLD {time.monotonic() - began[0]:.2f}", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)


def start(rank: int, port: int, scenario: str, folder: Path) -> int:
    """Forks one rank, which ends as a script does, exit handlers included."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(folder / f"rank_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.excepthook = told
    kind, where = scenario.split(":")
    rest.append((kind, where, str(folder)))
    return 0


rest: list[tuple[str, str, str]] = []


def run(scenario: str, folder: Path) -> dict[str, Any] | None:
    """Runs one scenario; None in the ranks themselves."""
    folder.mkdir(parents=True)
    port = free_port()
    pids: dict[int, int] = {}
    for rank in range(RANKS):
        pid = start(rank, port, scenario, folder)
        if not pid:
            return None
        pids[rank] = pid
    statuses: dict[int, int | None] = dict.fromkeys(pids)
    deadline = time.monotonic() + LIMIT
    while None in statuses.values() and time.monotonic() < deadline:
        for rank, pid in pids.items():
            if statuses[rank] is None and os.waitpid(pid, os.WNOHANG)[0]:
                statuses[rank] = 0
        if scenario.startswith("stop:") and all(statuses[rank] is not None for rank in pids if rank != CULPRIT):
            break
        time.sleep(0.02)
    for rank, pid in pids.items():
        if statuses[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    said = [(folder / f"rank_{rank}").read_text(errors="replace") for rank in range(RANKS)]
    hung = [rank for rank, status in statuses.items() if status is None and not (scenario[:5] == "stop:" and rank == 1)]
    return {"scenario": scenario, "hung": hung, "said": said}


def main() -> None:
    for number, scenario in enumerate(sys.argv[2:]):
        found = run(scenario, Path(sys.argv[1]) / str(number))
        if found is None:
            train(*rest[0])
            return
        print(json.dumps(found), flush=True)


main()
