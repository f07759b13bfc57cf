"""Learning rates of a schedule, shown before its first step."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from accel_observe.meters.lr_preview import learning_rates
from accel_state.errors import ConfigError


def test_warmup_ends_where_the_rate_is_highest() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    shown = learning_rates(LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7)), 20)
    assert shown.peak_step == 6
    assert str(shown).startswith("learning rate 0.0143 at step 0, 0.1 at step 6 (highest)")


def test_per_process_steps_are_shown_as_they_will_be() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert learning_rates(StepLR(optimizer, step_size=4), 4, repeats=2).rates == pytest.approx((1.0, 1.0, 0.1, 0.1))


def test_showing_does_not_move_the_schedule() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler: LRScheduler = StepLR(optimizer, step_size=1)
    learning_rates(scheduler, 5)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_a_schedule_that_follows_a_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="follows a metric"):
        learning_rates(ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0)), 3)
