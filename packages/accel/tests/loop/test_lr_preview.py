"""A schedule shown before the first step is the one that is then followed."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from accel import Accelerator

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
