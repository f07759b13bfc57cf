"""The job that ``accel test`` launches: ``save FOLDER`` trains and saves, ``resume FOLDER`` loads and continues."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def main(word: str, folder: str) -> None:
    """Trains three steps; ``resume`` loads the checkpoint before, ``save`` saves one afterwards.

    Raises:
        AssertionError: the loaded state differs from the saved one.
    """
    import torch

    from accel import Accelerator
    from accel_testing.equivalence.models import TinyMLP

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = TinyMLP()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if word == "resume":
        accelerator.load_state(f"{folder}/state")
        with open(f"{folder}/sum", encoding="utf-8") as file:
            saved = float(file.read())
        loaded = _sum(accelerator.unwrap_model(model))
        assert abs(loaded - saved) < 1e-6, f"saved {saved}, loaded {loaded}"
    for _ in range(3):
        accelerator.backward(model(torch.ones(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if word == "save":
        accelerator.save_state(f"{folder}/state")
        if accelerator.is_main_process:
            with open(f"{folder}/sum", "w", encoding="utf-8") as file:
                file.write(repr(_sum(accelerator.unwrap_model(model))))
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} processes, {accelerator.backend.name}, {accelerator.device}")
    accelerator.end_training()


def _sum(model: "nn.Module") -> float:
    return sum(p.double().sum().item() for p in model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
