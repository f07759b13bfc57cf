"""A schedule shown before the first step is the one that is then followed."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from accel import Accelerator
from accel_observe.meters.lr_preview import learning_rates
from accel_state.errors import ConfigError

STEPS = 20
SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, step_size=5),
    "warmup": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_shown_are_those_used(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, SCHEDULES[name](optimizer))
    shown = scheduler.learning_rates(STEPS)
    used = []
    for _ in range(STEPS):
        used.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        if len(used) < STEPS:
            scheduler.step()
        optimizer.zero_grad()
    assert shown.rates == pytest.approx(used)
    assert (shown.first, shown.last, shown.peak) == (shown.rates[0], shown.rates[-1], max(shown.rates))


def test_warmup_ends_where_the_rate_is_highest() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    shown = learning_rates(SCHEDULES["warmup"](optimizer), STEPS)
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
