"""Classification with exact metrics: every test sample counts once, on any number of processes.

python examples/classification.py
accel launch --cpu --num_processes 2 examples/classification.py
"""

import argparse
import math
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed


def spirals(count: int, classes: int = 3) -> TensorDataset:
    """Points on spiral arms, and the number of the arm of each."""
    arms = torch.arange(count) % classes
    radius = torch.rand(count).sqrt()
    angle = 2 * math.pi * (arms / classes + radius) + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Accuracy over all processes, and the number of samples it was computed on."""
    model.eval()
    guesses, answers = [], []
    for points, arms in loader:
        with torch.no_grad():
            predicted = model(points).argmax(1)
        predicted, arms = accelerator.gather_for_metrics((predicted, arms))
        guesses.append(predicted)
        answers.append(arms)
    model.train()
    correct = torch.cat(guesses) == torch.cat(answers)
    return correct.float().mean().item(), len(correct)


def main(arguments: Sequence[str] | None = None) -> tuple[float, int]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args(arguments)

    accelerator = Accelerator()
    set_seed(0)
    train, test = spirals(3000), spirals(501)  # 501: not a multiple of anything that matters
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch_size = 64 // accelerator.num_processes
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * math.ceil(3000 / 64))
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, DataLoader(test, batch_size=100)
    )
    for epoch in range(options.epochs):
        for points, arms in train_loader:
            loss = cross_entropy(model(points), arms)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy, count = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {accuracy:.1%} of {count} right")
    accelerator.end_training()
    return accuracy, count


if __name__ == "__main__":
    main()
