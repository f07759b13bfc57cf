"""The same optimizer steps on any number of processes, also when that number changes in the middle.

    accel launch --cpu --num_processes 1 examples/elastic.py --stop_after 10
    accel launch --cpu --num_processes 3 examples/elastic.py

ends with the weights of one undisturbed run on one process (up to the order of additions).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed


def main(arguments: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--global_batch_size", type=int, default=50, help="samples of one optimizer step, everywhere")
    parser.add_argument("--batch_size", type=int, default=16, help="the most that fits on one process")
    parser.add_argument("--stop_after", type=int, default=None, help="save and stop after this many optimizer steps")
    options = parser.parse_args(arguments)

    loading = DataLoaderConfiguration(global_batch_size=options.global_batch_size, data_seed=0)
    accelerator = Accelerator(dataloader_config=loading)
    set_seed(0)
    inputs = torch.randn(1010, 6, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, inputs.prod(1, keepdim=True)), options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
        accelerator.print(f"going on at sample {loader.position.samples} of epoch {loader.epoch}")

    steps = 0
    stopped = False
    while loader.epoch < 2 and not stopped:
        for x, y in loader:
            with accelerator.accumulate(model):  # number and weights of the micro-batches come from the loader
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if steps == options.stop_after:
                accelerator.save_state(checkpoint)
                stopped = True
                break
    accelerator.print(f"{steps} steps on {accelerator.num_processes} processes")
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


if __name__ == "__main__":
    main()
