"""Placeholders of the optimizer and the scheduler of a configuration: they hold arguments, and do nothing silently."""

import pytest
import torch
from torch import nn

from accel_deepspeed import DummyOptim, DummyScheduler
from accel_state.errors import PrepareError


def test_a_placeholder_of_a_scheduler_takes_no_state_and_no_step() -> None:
    scheduler = DummyScheduler(DummyOptim(nn.Linear(2, 2).parameters()), 10)
    scheduler.load_state_dict(scheduler.state_dict())
    with pytest.raises(PrepareError, match="has no state, but got last_epoch"):
        scheduler.load_state_dict({"last_epoch": 3})
    with pytest.raises(PrepareError, match="step what prepare returns"):
        scheduler.step()


def test_a_placeholder_of_an_optimizer_takes_no_step() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(PrepareError, match="updates nothing itself"):
        DummyOptim(model.parameters()).step()
