"""Save hooks: weights that they remove or replace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_ckpt import open_checkpoint
from accel_state.errors import CheckpointError


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_that_a_hook_replaces_are_saved(tmp_path: Path, asynchronous: bool) -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3))
    expected, untouched = first.weight.detach().clone() / 2, second.weight.detach().clone()

    def halve(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        weights[0] = {name: value / 2 for name, value in weights[0].items()}

    accelerator.register_save_state_pre_hook(halve)
    accelerator.save_state(tmp_path / "a", asynchronous=asynchronous)
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(first.weight, expected)
    assert torch.equal(second.weight, untouched)


def test_a_hook_may_remove_the_weights_of_one_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    accelerator.save_state(tmp_path / "a")
    with open_checkpoint(tmp_path / "a") as saved:
        assert "model" not in saved.names
        assert saved.read("model_1")["weight"].shape == (3, 3)


def replaced_and_removed(weights: list[Any]) -> None:
    weights[0] = dict(weights[0])
    weights.pop()


def replaced_by_nothing(weights: list[Any]) -> None:
    weights[1] = None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (replaced_and_removed, "left 1 state dicts for 2 models"),
        (replaced_by_nothing, "weights of model_1 by a NoneType"),
    ],
)
def test_weights_that_belong_to_no_model_are_refused(
    tmp_path: Path, change: Callable[[list[Any]], None], error: str
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: change(weights))
    with pytest.raises(CheckpointError, match=error):
        accelerator.save_state(tmp_path / "a")
    assert not (tmp_path / "a").exists()
