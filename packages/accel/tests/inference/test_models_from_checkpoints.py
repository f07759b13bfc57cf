"""Models on the meta device that get their weights from a checkpoint: one copy on every rank, and the same training."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator, init_empty_weights, load_checkpoint_in_model
from accel_testing.faults.memory import peak_allocated

WIDTH, BLOCKS = 256, 8
LARGEST = WIDTH * WIDTH * 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def trained(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(prepared(torch.full((2, WIDTH), 1.0 + step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(prepared)


@pytest.mark.parametrize(
    "strategy", [pytest.param("single", marks=pytest.mark.ranks(1)), pytest.param("ddp", marks=pytest.mark.ranks(2))]
)
def test_a_model_gets_its_weights_without_a_second_copy(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / str(os.getpid())  # each rank's own
    folder.mkdir()
    save_file(build().state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        model = build()
    peak = peak_allocated(lambda: load_checkpoint_in_model(model, folder))
    assert BLOCKS * LARGEST <= peak < (BLOCKS + 1) * LARGEST
    accelerator = Accelerator(cpu=True, strategy=strategy)
    found, expected = (trained(accelerator, one) for one in (model, build()))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
