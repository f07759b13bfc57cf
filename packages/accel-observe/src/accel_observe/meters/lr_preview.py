"""Preview of a schedule's learning rates, computed on a copy before the first step."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any, final

import torch

from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class LearningRates:
    """Learning rates of a schedule over the optimizer steps of a run, for its first parameter group.

    Attributes:
        first: rate of the first step.
        peak: highest rate.
        peak_step: the first step, from 0, with that rate: the end of the warm-up.
        last: rate of the last step.
        rates: rate of every step.
    """

    first: float
    peak: float
    peak_step: int
    last: float
    rates: tuple[float, ...]

    def __str__(self) -> str:
        steps = len(self.rates)
        return (
            f"learning rate {self.first:.3g} at step 0, {self.peak:.3g} at step {self.peak_step} (highest), "
            f"{self.last:.3g} at step {steps - 1} (last of {steps})"
        )


def learning_rates(scheduler: Any, num_steps: int, *, repeats: int = 1) -> LearningRates:
    """Steps a copy of ``scheduler`` through ``num_steps`` optimizer steps; the scheduler itself does not step.

    ``repeats`` is the number of its steps for each optimizer step. Schedules that follow a metric cannot be previewed.

    Raises:
        ConfigError: ``num_steps`` is not at least 1, or the scheduler cannot be stepped without a metric.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps is {num_steps}; a schedule is shown over at least 1 step")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau follows a metric, so its learning rates cannot be foreseen")
    twin = _without_parameters(scheduler)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no optimizer step was taken, which is intended here
        for _ in range(num_steps):
            rates.append(float(twin.optimizer.param_groups[0]["lr"]))
            for _ in range(repeats):
                total = getattr(twin, "total_steps", None)
                if total is None or twin.last_epoch < total - 1:
                    twin.step()
    peak_step = max(range(num_steps), key=lambda step: (rates[step], -step))
    return LearningRates(rates[0], rates[peak_step], peak_step, rates[-1], tuple(rates))


def _without_parameters(scheduler: Any) -> Any:
    """Copies a scheduler; the copy's optimizer has the same groups and options, and one number as its model."""
    optimizer = scheduler.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = [
        {**{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}, "params": [torch.zeros(1)]}
        for group in optimizer.param_groups
    ]
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    stand_in.param_groups = groups
    memo = {id(scheduler.optimizer): stand_in, id(optimizer): stand_in}
    return copy.deepcopy(scheduler, memo)
