"""Saving and loading in the middle of what a script has set: default devices, inference mode, a graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator


def trained(steps: int = 2) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    step(accelerator, model, optimizer, steps)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "surroundings",
    [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad],
    ids=["meta", "inference", "no_grad"],
)
def test_a_run_is_saved_and_goes_on_whatever_surrounds_the_calls(
    tmp_path: Path, surroundings: Callable[[], AbstractContextManager[object]]
) -> None:
    """The default device "meta" stands for any that is not the CPU."""
    accelerator, model, optimizer = trained()
    with surroundings():
        accelerator.save_state(tmp_path / "a")
    step(accelerator, model, optimizer)
    expected = model.weight.detach().clone()
    other, fresh, its = trained(0)
    with surroundings():
        other.load_state(tmp_path / "a")
    step(other, fresh, its)
    assert torch.equal(fresh.weight, expected)


def test_a_backward_through_weights_that_a_load_has_replaced_is_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    accelerator.save_state(tmp_path / "a")
    loss = model(torch.ones(2, 3)).sum()
    accelerator.load_state(tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerator.backward(loss)
