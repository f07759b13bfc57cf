"""Loops of random settings: what each process reads, gathers and learns, printed by the number of the loop.

loops.py COUNT
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

Row = dict[str, torch.Tensor]


class Rows(Dataset[Row]):
    """Rows with their numbers."""

    def __init__(self, count: int) -> None:
        self.features = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Row:
        return {"x": self.features[index], "number": torch.tensor(index)}


class Stream(IterableDataset[Row]):
    """The same rows in order, without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return (self.rows[index] for index in range(len(self.rows)))


def loader(kind: str, rows: Rows, size: int, *, drop_last: bool) -> DataLoader[Row]:
    """A loader as a script makes it."""
    if kind == "stream":
        return DataLoader(Stream(rows), size, drop_last=drop_last)
    if kind == "weighted":
        sampler = WeightedRandomSampler([1 + index % 3 for index in range(len(rows))], len(rows))
        return DataLoader(rows, size, sampler=sampler, drop_last=drop_last)
    return DataLoader(rows, size, shuffle=kind == "shuffled", drop_last=drop_last)


def trained(number: int) -> list[Any]:
    """Trains two epochs with the settings of this number; returns what this process has seen."""
    draw = random.Random(number)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    kind = draw.choice(["map", "shuffled", "shuffled", "weighted", "stream"])
    data = {
        "split_batches": draw.random() < 0.25,
        "dispatch_batches": draw.choice([None, None, True, False]),
        "use_seedable_sampler": draw.random() < 0.3
        and kind != "weighted",  # Accelerate shares no draws of weights then
    }
    window = {
        "num_steps": draw.choice([1, 1, 2, 3]),
        "adjust_scheduler": draw.random() < 0.5,
        "sync_with_dataloader": draw.random() < 0.7,
        "sync_each_batch": draw.random() < 0.2,
    }
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=draw.choice(["no", "no", "bf16"]),
        dataloader_config=DataLoaderConfiguration(**data),
        gradient_accumulation_plugin=GradientAccumulationPlugin(**window),
        step_scheduler_with_optimizer=draw.random() < 0.8,
    )
    size = draw.choice([2, 4]) if data["split_batches"] else draw.choice([1, 2, 3, 4])
    clip, skipped, drop_last = draw.choice([None, None, 1.0, "value"]), draw.choice([0, 0, 1]), draw.random() < 0.3
    rows = Rows(draw.choice([9, 11, 13, 16, 17]))
    set_seed(number)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batches: Any = loader(kind, rows, size, drop_last=drop_last)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    seen: list[Any] = []
    for epoch in range(2):
        resumed = bool(skipped and not epoch)
        for batch in accelerator.skip_first_batches(batches, skipped) if resumed else batches:
            with accelerator.accumulate(model):
                loss = model(batch["x"]).float().square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.1)
                elif accelerator.sync_gradients and clip is not None:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += [batch["number"].tolist(), accelerator.gather(batch["number"]).tolist(), loss.item()]
            seen += [
                accelerator.sync_gradients,
                scheduler.get_last_lr()[0],
                accelerator.gradient_state.end_of_dataloader,
            ]
            if not resumed:  # Accelerate gives the samples that fill the last batch twice after skipped batches
                seen.append(accelerator.gather_for_metrics(batch["number"]).tolist())
        seen.append(len(batches) if kind != "stream" else None)
    return [*seen, *(parameter.detach().sum().item() for parameter in accelerator.unwrap_model(model).parameters())]


def main() -> None:
    """Prints a line for each number, with what all processes have seen."""
    for number in range(int(sys.argv[1])):
        everybody = gather_object([trained(number)])
        if Accelerator(cpu=True).is_main_process:
            print("FIGURES " + json.dumps([str(number), everybody]), flush=True)
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main()
