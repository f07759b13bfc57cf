"""What the tests of the hang watchdog run: three ranks of a training loop, of which rank 1 goes another way.

    python diverging_ranks.py FOLDER KIND:WHERE...

Each scenario runs in processes forked from this one, which has imported everything, and prints one line of JSON: how
each rank ended, what it said, and how many seconds after the ranks parted it was told. A few run side by side, as most
of a scenario is waiting.
"""

import atexit
import gc
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
from accel_testing.ranks.launchers import free_port

RANKS, LIMIT, CULPRIT, TOGETHER = 3, 45.0, 1, 3


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


def leave() -> None:
    """Ends a rank after its exit handlers: taking the interpreter apart as well costs a second and proves nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def become(rank: int, port: int, folder: Path) -> None:
    """Makes a forked process the rank that a launcher would have started."""
    os.setsid()
    out = os.open(folder / f"rank_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.excepthook = told
    atexit.register(leave)  # called after all that the program registers


class Scenario:
    """The ranks of one scenario, from their start to what is known of them in the end."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.pids: dict[int, int] = {}
        self.deadline = 0.0

    def start(self) -> bool:
        """Forks the ranks; true in each of them."""
        self.folder.mkdir(parents=True)
        port, self.deadline = free_port(), time.monotonic() + LIMIT
        for rank in range(RANKS):
            pid = os.fork()
            if not pid:
                become(rank, port, self.folder)
                return True
            self.pids[rank] = pid
        return False

    def is_over(self) -> bool:
        """Whether all have ended that will, or the time has."""
        for rank, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[rank]
        stopped = {CULPRIT} if self.name.startswith("stop:") else set()
        return set(self.pids) <= stopped or time.monotonic() > self.deadline

    def result(self) -> dict[str, Any]:
        """Who hung, and what each said; ends what is left."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        said = [(self.folder / f"rank_{rank}").read_text(errors="replace") for rank in range(RANKS)]
        hung = [rank for rank in self.pids if not (self.name.startswith("stop:") and rank == CULPRIT)]
        return {"scenario": self.name, "hung": hung, "said": said}


def main() -> None:
    gc.freeze()  # what is there now is not looked at again, so the processes go on sharing it
    folder, *names = sys.argv[1:]
    waiting = [Scenario(name, Path(folder) / str(number)) for number, name in enumerate(names)]
    running: list[Scenario] = []
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            scenario = waiting.pop(0)
            if scenario.start():
                train(*scenario.name.split(":"), str(scenario.folder))
                return
            running.append(scenario)
        for scenario in [one for one in running if one.is_over()]:
            running.remove(scenario)
            print(json.dumps(scenario.result()), flush=True)
        time.sleep(0.02)


main()
