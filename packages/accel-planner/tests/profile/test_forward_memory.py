"""The memory that modules need beside their weights is that of a real forward."""

import pytest
import torch
from torch import nn

from accel_planner.errors import PlanError
from accel_planner.profile.forward_memory import forward_memory
from accel_planner.profile.memory_tracker import StorageWatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def build() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def test_the_peak_is_that_of_a_real_forward() -> None:
    model, x = build(), torch.ones(16, 8)
    found = forward_memory(model, x)
    with torch.no_grad(), StorageWatch([*model.parameters(), x]) as watch:
        model(x)
    assert found[""] == watch.peak + x.nbytes
    assert set(found) == {name for name, _ in model.named_modules()}


def test_a_module_has_what_is_live_while_it_computes() -> None:
    found = forward_memory(build(), torch.ones(16, 8))
    row = 16 * 4  # bytes of one column
    assert found["0.up"] == row * (8 + 64)
    assert found["0"] == row * (8 + 64 + 64)
    assert found["2"] == row * (8 + 8 + 2)
    assert found["1"] > found["2"]


def test_a_model_on_the_meta_device_is_seen_in_another_dtype() -> None:
    with torch.device("meta"):
        model = build()
    single, half = (forward_memory(model, torch.ones(16, 8), dtype=dtype) for dtype in (None, torch.bfloat16))
    assert {name: size // 2 for name, size in single.items()} == half


def test_a_sample_that_does_not_fit_is_named() -> None:
    with pytest.raises(PlanError, match=r"Sequential cannot be run with a batch of \(16, 9\)"):
        forward_memory(build(), torch.ones(16, 9))
