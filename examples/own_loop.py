"""A plain PyTorch loop that borrows two layers: accel-data for its position, accel-ckpt for its checkpoints.

Nothing else of accel is imported. Under ``torchrun`` every process reads its share; on its own it reads everything.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import CheckpointDirectory, keep_last
from accel_data import LoaderOptions, prepare_loader
from accel_state import DataShard


def average_gradients(model: torch.nn.Module) -> None:
    """What DistributedDataParallel does, in its simplest form."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main(arguments: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/own_loop"))
    parser.add_argument("--stop_after", type=int, default=None, help="stop after this many steps")
    options = parser.parse_args(arguments)

    ranks, opened = int(os.environ.get("WORLD_SIZE", "1")), False
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        opened = True
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)
    inputs = torch.randn(400, 5, dtype=torch.float64)
    model = torch.nn.Linear(5, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    plain = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=20 // ranks, shuffle=True)
    loader = prepare_loader(plain, DataShard(rank, ranks), options=LoaderOptions(data_seed=0))

    series = CheckpointDirectory(options.folder, retention=keep_last(2))
    latest = series.latest()
    if latest is not None:
        model.load_state_dict(latest.read("model"))
        optimizer.load_state_dict(latest.read("optimizer"))
        loader.load_state_dict(latest.read("loader"))

    steps = 0
    while loader.epoch < 3 and steps != options.stop_after:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if ranks > 1:
                average_gradients(model)
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    saved = series.save(parts, metadata={"steps": steps})
    if rank == 0:
        print(f"{steps} steps, saved to {saved.path}")
    if opened:
        dist.destroy_process_group()
    return model.state_dict()


if __name__ == "__main__":
    main()
