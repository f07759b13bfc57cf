"""``accelerate test``: collectives and training in the processes that the settings ask for."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.helpers.operations import gather

ROWS, STEPS_OF, RATE = 32, 4, 0.05


def train(accelerator: CompatAccelerator | None, batch_size: int) -> torch.Tensor:
    """Returns the parameters of a linear model after one epoch; its global batches are the same on any number of ranks."""
    rows = torch.linspace(-1, 1, ROWS)[:, None]
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TensorDataset(rows, 2 * rows + 1), batch_size=batch_size)
    trained = model
    if accelerator is not None:
        trained, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(trained(inputs), targets)
        optimizer.zero_grad()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in model.parameters()])


def main() -> None:
    """Compares collectives and training with those of one process.

    Raises:
        SystemExit: they differ; says by how much.
    """
    accelerator = CompatAccelerator()
    ranks = gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    if ranks != list(range(accelerator.num_processes)):
        raise SystemExit(f"gather returned the ranks {ranks}; expected {list(range(accelerator.num_processes))}")
    rows = ROWS // STEPS_OF
    here = max(1, rows // accelerator.num_processes)
    distance = float((train(accelerator, here) - train(None, here * accelerator.num_processes)).abs().max())
    limit = 1e-5 if accelerator.mixed_precision == "no" else 0.05
    if not distance <= limit:
        raise SystemExit(f"weights differ from those of one process by {distance:.3g}; expected at most {limit}")
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}: weights as in one process")
    accelerator.print("Test is a success! You are ready for your distributed training!")


if __name__ == "__main__":
    main()
