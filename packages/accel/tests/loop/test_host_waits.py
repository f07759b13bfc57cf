"""Calls on the path of a step that would wait for a device: none in accel's own code."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_observe.tracking.reductions import reduced

from . import host_waits
from .host_waits import waits

Loop = Callable[[Accelerator, Any, Any, Any, torch.Tensor], None]


def step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, rows: torch.Tensor, **how: Any) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(rows).square().sum(), **how)
        if accelerator.sync_gradients and not how:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def weighted(weight: Any) -> Loop:
    return lambda accelerator, *rest: step(accelerator, *rest, weight=weight)


def logged(accelerator: Accelerator, *rest: Any) -> None:
    step(accelerator, *rest)
    values = {"loss": torch.ones(()), "rows": 3, "worst": torch.ones(()), "lr": 0.1}
    found = reduced(values, {"loss": "mean", "rows": "min", "worst": "max"}, accelerator.session)
    assert set(found) == set(values)


LOOPS: dict[str, Loop] = {
    "plain": step,
    "number as weight": weighted(3),
    "tensor as weight": weighted(torch.tensor(3.0)),
    "logged": logged,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulated": {"gradient_accumulation_steps": 4},
    "fsdp": {"strategy": "fsdp"},
    "fsdp accumulated": {"strategy": "fsdp", "gradient_accumulation_steps": 4},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_step_waits_for_no_device(rank: int, loop: Loop, options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **options)
    made: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters()))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 10))
    rows: Sequence[torch.Tensor] = [torch.randn(3, 4) for _ in range(9)]
    for one in rows[:4]:
        loop(accelerator, model, optimizer, scheduler, one)
    with waits() as found:
        for one in rows[4:]:
            loop(accelerator, model, optimizer, scheduler, one)
    assert sorted(set(found)) == []
    accelerator.end_training()


def test_calls_that_wait_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_waits, "place_in_accel", lambda: "a.py:1")
    one = torch.ones(1)
    with waits() as found:
        one.item(), bool(one), float(one), one.cpu(), one.tolist(), torch.tensor(1.0), torch.as_tensor(2)
        torch.full((), 3.0), torch.as_tensor(one)
    names = {line.partition(": ")[2] for line in found}
    assert names >= {"item", "__bool__", "__float__", "cpu", "tolist", "tensor", "as_tensor"}
    assert sum(line.endswith((": tensor", ": as_tensor")) for line in found) == 2
