"""Saves every few steps and resumes at the next sample, in the middle of an epoch, as if nothing had happened.

    python examples/resume.py --stop_after 30    # as if it had been killed there
    python examples/resume.py                    # goes on

With ``accel launch --max_restarts 3 examples/resume.py`` a run that dies does so by itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ProjectConfiguration
from accel.utils import set_seed


class Progress:
    """Optimizer steps taken; it is in every checkpoint because it is registered."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(arguments: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/resume"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save_every", type=int, default=8)
    parser.add_argument("--stop_after", type=int, default=None)
    options = parser.parse_args(arguments)

    project = ProjectConfiguration(options.folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(1)
    inputs = torch.randn(300, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=10, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((options.folder / "checkpoints").glob("checkpoint_*")):
        folder = accelerator.load_state("latest")
        accelerator.print(f"resuming after step {progress.step} from {folder}")

    while progress.step < options.steps:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % options.save_every == 0:
                accelerator.save_state()
            if progress.step in (options.steps, options.stop_after):
                break
        if progress.step == options.stop_after:
            break
    accelerator.print(f"stopped after step {progress.step} with loss {loss.item():.4f}")
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


if __name__ == "__main__":
    main()
