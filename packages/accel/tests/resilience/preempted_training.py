"""What the tests of preemption launch: a training run that keeps a record of every sample and loss it has used.

Run by ``accel launch`` with a folder; ``MOMENT`` says where it has its launcher told to end (SIGTERM).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, ProjectConfiguration

FOLDER, STEPS = Path(sys.argv[1]), 30
MOMENT, RANK = os.environ.get("MOMENT", ""), int(os.environ["RANK"])


def at(moment: str) -> None:
    """Has the launcher told to end if this is the moment; reading data, or loading, then takes very long."""
    global MOMENT
    if moment == MOMENT:
        MOMENT = "over"
        if RANK == 0:
            os.kill(int(os.environ["ACCEL_LAUNCHER_PID"]), signal.SIGTERM)
        if moment in ("data", "loading"):
            time.sleep(60)


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if progress.steps % 12 == 5:
            at("data")
        return index, torch.full((4,), index / 96, dtype=torch.float64)


class Progress:
    """Steps done, and what each of them used: a part of the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0
        self.ledger: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        # Loading asks as well, for what it would put back if another part refused; nothing has been trained then.
        at("saving" if self.steps else "loading")
        return {"steps": self.steps, "ledger": self.ledger}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.ledger = state["steps"], state["ledger"]


progress = Progress()
project = ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2)
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
loader: Any = DataLoader(Numbered(), batch_size=24 // accelerator.num_processes // 2, shuffle=True)
evaluation: Any = DataLoader(Numbered(), batch_size=24)
model, optimizer, scheduler, loader, evaluation = accelerator.prepare(model, optimizer, scheduler, loader, evaluation)
accelerator.register_for_checkpointing(progress)
accelerator.resume()
print(json.dumps({"rank": RANK, "resumed": progress.steps}), flush=True)
(FOLDER / f"ready_{RANK}").touch()
while progress.steps < STEPS:
    model.train()
    for ids, rows in loader:
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        at("step")
        used = sorted(accelerator.gather(ids).tolist())
        progress.ledger.append([*used, accelerator.reduce(loss.detach(), "mean").item()])
        progress.steps += 1
        if (str(progress.steps), RANK, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (os.environ.get("KILL"), 1, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 0:
            (FOLDER / "done").write_text(str(progress.steps))
        if progress.steps % 7 == 0:
            accelerator.save_state()
        time.sleep(float(os.environ.get("SLOW", "0")))
        if progress.steps == STEPS:
            break
    model.eval()
    for _, rows in evaluation:
        with torch.no_grad():
            accelerator.gather_for_metrics(model(rows))
        at("evaluation")
        time.sleep(float(os.environ.get("SLOW", "0")))
if accelerator.is_main_process:
    weights = [parameter.tolist() for parameter in model.parameters()]
    (FOLDER / "result.json").write_text(json.dumps({"ledger": progress.ledger, "weights": weights}))
accelerator.end_training()
