"""Two networks trained against each other: each has its optimizer, its loss and its own accumulation window.

A generator learns to draw numbers from a bell curve around 3 that it only ever sees samples of.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed


def network(inputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))


def looks(logits: torch.Tensor, real: float) -> torch.Tensor:
    """How far the critic's opinion is from ``real`` (1: all real, 0: all fake)."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model without gradients of its own: what it has accumulated stays as it is."""
    model.requires_grad_(False)
    try:
        yield model
    finally:
        model.requires_grad_(True)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    real_numbers = 3.0 + 0.5 * torch.randn(6400, 1)
    generator, critic = network(4), network(1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9))
    loader = DataLoader(real_numbers, batch_size=64 // accelerator.num_processes, shuffle=True)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )
    set_seed(0, device_specific=True)  # the processes draw different noise

    for epoch in range(options.epochs):
        for real in loader:
            fake = generator(torch.randn(len(real), 4, device=accelerator.device))
            with accelerator.accumulate(critic):
                both = critic(torch.cat([real, fake.detach()]))
                accelerator.backward(looks(both[: len(real)], 1.0) + looks(both[len(real) :], 0.0))
                critic_optimizer.step()
                critic_optimizer.zero_grad()
            with accelerator.accumulate(generator):
                with frozen(accelerator.unwrap_model(critic)) as opinion_of:
                    accelerator.backward(looks(opinion_of(fake), 1.0))
                generator_optimizer.step()
                generator_optimizer.zero_grad()
        drawn = accelerator.gather(generator(torch.randn(500, 4, device=accelerator.device)).detach())
        mean, spread = drawn.mean().item(), drawn.std().item()
        accelerator.print(f"epoch {epoch}: draws {mean:.2f} +- {spread:.2f}, wanted 3.00 +- 0.50")
    accelerator.end_training()
    return mean, spread


if __name__ == "__main__":
    main()
