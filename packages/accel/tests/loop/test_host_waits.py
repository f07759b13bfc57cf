"""Calls on the path of a step that would wait for a device: none in accel's own code."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel import Accelerator
from accel_observe.tracking.reductions import reduced

SOURCES = str(Path(accel.__file__).parents[3])
WAITING = {
    *(torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.nonzero),
}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
PASSED_ON = ("torch/overrides.py", "torch/utils/_python_dispatch.py", "torch/_tensor.py")
Loop = Callable[[Accelerator, Any, Any, Any, torch.Tensor], None]


def place_in_accel() -> str:
    """The line of accel that called torch; empty if the caller is not accel, but torch's optimizers, for example."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(PASSED_ON):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}" if file.startswith(SOURCES) and "/src/" in file else ""


class Waits(TorchFunctionMode):
    """Lists the lines of accel that read a tensor, or copy numbers of the host to a tensor's device."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args else None
        waits = function in WAITING or (function in FROM_HOST and not isinstance(given, torch.Tensor))
        if waits and (place := place_in_accel()):
            self.found.append(f"{place}: {getattr(function, '__name__', function)}")
        return function(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Lists the lines of accel from which an operator reads a number of a tensor."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and (place := place_in_accel()):
            self.found.append(f"{place}: {function}")
        return function(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    found: list[str] = []
    with Reads(found), Waits(found):
        yield found


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
    monkeypatch.setattr(sys.modules[__name__], "place_in_accel", lambda: "a.py:1")
    one = torch.ones(1)
    with waits() as found:
        one.item(), bool(one), float(one), one.cpu(), one.tolist(), torch.tensor(1.0), torch.as_tensor(2)
        torch.full((), 3.0), torch.as_tensor(one)
    names = {line.partition(": ")[2] for line in found}
    assert names >= {"item", "__bool__", "__float__", "cpu", "tolist", "tensor", "as_tensor"}
    assert sum(line.endswith((": tensor", ": as_tensor")) for line in found) == 2
