"""A schedule goes on in a run whose optimizer has its groups of parameters in other places."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from accel import Accelerator

RATES = {"body": 1.0, "head": 0.1, "new": 0.01}
Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, [group["lr"] / 8 for group in optimizer.param_groups],
        [group["lr"] for group in optimizer.param_groups], step_size_up=4, cycle_momentum=False,
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [1, 3])], [3]
    ),
}  # fmt: skip


class Run:
    """A run whose optimizer has a group of parameters for each name, in this order."""

    def __init__(self, *names: str, schedule: str) -> None:
        self.names, self.accelerator = names, Accelerator(cpu=True)
        model = nn.ModuleDict({name: nn.Linear(2, 1) for name in sorted(names)})
        groups = [{"params": list(model[name].parameters()), "lr": RATES[name]} for name in names]
        optimizer = torch.optim.SGD(groups)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, SCHEDULES[schedule](optimizer)
        )

    def rates(self, steps: int) -> list[dict[str, float]]:
        """The learning rates of the groups behind each of so many steps, by name."""
        found = []
        for _ in range(steps):
            self.accelerator.backward(sum(part(torch.ones(1, 2)).sum() for part in self.model.values()))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            found.append(
                {name: group["lr"] for name, group in zip(self.names, self.optimizer.param_groups, strict=True)}
            )
        return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_for_groups_in_the_same_order(tmp_path: Path, schedule: str) -> None:
    saving, loading = (Run("body", "head", schedule=schedule) for _ in range(2))
    saving.rates(2)
    saving.accelerator.save_state(tmp_path / "a")
    loading.accelerator.load_state(tmp_path / "a")
    assert loading.rates(6) == saving.rates(6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_for_groups_in_another_order(tmp_path: Path, schedule: str) -> None:
    saving, loading = Run("body", "head", schedule=schedule), Run("head", "body", schedule=schedule)
    saving.rates(2)
    saving.accelerator.save_state(tmp_path / "a")
    loading.accelerator.load_state(tmp_path / "a")
    assert loading.rates(6) == saving.rates(6)


@pytest.mark.parametrize("schedule", ["lambda", "cyclic"])
@pytest.mark.parametrize("names", [("new", "body", "head"), ("head", "new")], ids="+".join)
def test_new_groups_keep_their_own_rates(tmp_path: Path, names: tuple[str, ...], schedule: str) -> None:
    saving, loading = Run("body", "head", schedule=schedule), Run(*names, schedule=schedule)
    whole = Run("body", "head", "new", schedule=schedule)
    saving.rates(2)
    whole.rates(2)
    saving.accelerator.save_state(tmp_path / "a")
    loading.accelerator.load_state(tmp_path / "a", strict=False)
    for found, expected in zip(loading.rates(6), whole.rates(6), strict=True):
        assert found == {name: expected[name] for name in names}
