"""Wrote ``run_0_1_0`` beside this file, once, with accel at commit eb18a74. Kept to show what it holds.

Each of ``one`` and ``two`` is a checkpoint of a run on that many ranks, saved after 6 batches of the second epoch; the
``.json`` beside it has the samples that each rank is given next, and the first weight after these are trained on.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAVED, AFTER, EPOCH = 6, 5, 24


def prepared(accelerator: Any, ranks: int) -> list[Any]:
    """The model, AdamW, schedule and loader of the run, in double precision."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loader = DataLoader(TensorDataset(torch.arange(96), rows), batch_size=4 // ranks, shuffle=True)
    return list(accelerator.prepare(model, optimizer, schedule, loader))


def passes(loader: Any) -> Iterator[Any]:
    """Batches without an end."""
    while True:
        yield from loader


def trained(accelerator: Any, objects: list[Any], batches: Any, count: int) -> list[list[int]]:
    """The samples of ``count`` batches, which were trained on."""
    model, optimizer, schedule, _ = objects
    seen = []
    for _ in range(count):
        numbers, rows = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(numbers.tolist())
    return seen


def facts(accelerator: Any, objects: list[Any], seen: list[list[int]]) -> dict[str, Any]:
    """What a run that is resumed has to repeat."""
    state = accelerator.get_state_dict(objects[0])
    return {"samples": accelerator.session.gather_object([seen]), "weight": state["0.weight"].flatten().tolist()}


def main(target: str) -> None:
    from accel import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    ranks = accelerator.num_processes
    objects = prepared(accelerator, ranks)
    batches = passes(objects[3])
    trained(accelerator, objects, batches, EPOCH)
    trained(accelerator, objects, batches, SAVED)
    accelerator.save_state(target, metadata={"made by": "eb18a74"})
    seen = trained(accelerator, objects, batches, AFTER)
    after = facts(accelerator, objects, seen)
    if accelerator.is_main_process:
        Path(f"{target}.json").write_text(json.dumps(after) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
        sys.exit()
    folder = Path(__file__).parent / "run_0_1_0"
    if folder.exists():
        sys.exit(f"{folder} exists; it is never written again")
    folder.mkdir()
    subprocess.run([sys.executable, __file__, str(folder / "one")], check=True, env={**os.environ})
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, __file__, str(folder / "two")], check=True, env={**os.environ})
