"""The largest micro-batch that fits: found on all ranks together, and no trace left of the search."""

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state.errors import CollectiveError, ConfigError


def prepared() -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    return accelerator, accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))


def needing(model: Any, limit: int) -> Any:
    """A loss for which the machine's memory really is too small beyond ``limit`` rows."""

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > limit:
            torch.empty(1 << 50)
        return model(rows).sum()

    return compute


@pytest.mark.parametrize(("limit", "size"), [(100, 24), (20, 12), (5, 3)])
def test_the_largest_half_that_fits_is_found_and_nothing_has_changed(limit: int, size: int) -> None:
    accelerator, model = prepared()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(24, 3)
    random = torch.get_rng_state()
    assert accelerator.find_micro_batch_size(needing(model, limit), batch) == size
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    accelerator.end_training()


def test_too_little_memory_for_anything_is_said() -> None:
    accelerator, model = prepared()
    with pytest.raises(ConfigError, match="not even 2 rows"):
        accelerator.find_micro_batch_size(needing(model, 1), torch.randn(8, 3), smallest=2)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_all_ranks_take_what_the_smallest_can(rank: int) -> None:
    accelerator, model = prepared()
    batch = torch.randn(16, 3)
    assert accelerator.find_micro_batch_size(needing(model, 100 if rank else 4), batch) == 4
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_another_error_on_one_rank_reaches_all(rank: int) -> None:
    accelerator, model = prepared()

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if rank:
            raise KeyError("label")
        return model(rows).sum()

    with pytest.raises(KeyError if rank else CollectiveError, match="label"):
        accelerator.find_micro_batch_size(compute, torch.randn(4, 3))
    accelerator.end_training()
