"""Trains for 24 steps, logs each, saves every eighth, and is killed or stopped where it is told; run again, it goes on.

Arguments: the folder; names of trackers; options as JSON:
``kill_at``: step at which it kills itself; ``stop_at``: step at which it saves and ends, as when it is preempted;
``interval``: seconds between deliveries, and below 1 all is delivered first; ``early``: trackers are made ready before
the checkpoint is loaded; ``init``: arguments of each tracker's library.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from accel import Accelerator, ProjectConfiguration
from accel_observe.tracking import QueueOptions

STEPS = 24


def main(folder: str, trackers: str, options: str) -> None:
    given = {"kill_at": -1, "stop_at": -1, "interval": 0.02, "early": False, "init": {}, **json.loads(options)}
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, log_with=trackers.split(","), project_config=project)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    for ready in (track, resume) if given["early"] else (resume, track):
        ready(accelerator, given)
    for step in range(8 * accelerator.save_iteration, STEPS):
        train(accelerator, model, step)
        if step in (given["kill_at"], given["stop_at"]) and given["interval"] < 1:
            wait_for_delivery(accelerator)
        if step == given["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 8 == 7:
            accelerator.save_state()
        if step == given["stop_at"]:
            break
    accelerator.end_training()


def track(accelerator: Accelerator, given: dict[str, Any]) -> None:
    queue = QueueOptions(interval=given["interval"], patience=120)
    accelerator.init_trackers("run", {"lr": 0.01, "net": {"width": 4}}, given["init"], queue=queue)


def resume(accelerator: Accelerator, given: dict[str, Any]) -> None:
    if Path(str(accelerator.project_dir), "checkpoints").exists():
        accelerator.load_state("latest")


def train(accelerator: Accelerator, model: torch.nn.Module, step: int) -> None:
    loss = model(torch.full((2, 4), step / STEPS)).square().mean()
    accelerator.backward(loss)
    for parameter in model.parameters():
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None
    accelerator.log({"loss": loss, "net": {"lr": 0.01}}, step=step)
    if step % 4 == 3:
        accelerator.log({"eval": float(step)}, step=step)


def wait_for_delivery(accelerator: Accelerator) -> None:
    while any(lane.state_dict()["held"] for lane in accelerator._log.tracking.lanes):
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
