"""Calls on the path of a step that would wait for a device: none in accel's own code."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, ParallelismConfig
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
@pytest.mark.sampled(5)
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


#: Modules that read tensors of the host, whatever the device.
ON_HOST = ("late_loss.py", "faults.py", "stages.py")
#: Degrees, arguments of the model, and the modules that read numbers of the device, as the documentation says.
AXES: dict[str, tuple[dict[str, int], dict[str, Any], set[str]]] = {
    "tp": ({"tp_size": 2}, {}, set()),
    "cp": ({"cp_size": 2}, {}, set()),
    "sp": ({"sp_size": 2}, {}, set()),
    "ep": ({"ep_size": 2}, {}, {"expert_parallel.py"}),
    "pp": ({"pp_size": 2}, {}, {"micro_batches.py"}),
    "pp with num_items_in_batch": ({"pp_size": 2}, {"num_items_in_batch": 28}, set()),
}


def modules(found: Sequence[str]) -> set[str]:
    """Names of the modules of calls that wait, without those that read tensors of the host."""
    return {line.partition(".py:")[0].rpartition("/")[2] + ".py" for line in found} - set(ON_HOST)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("degrees", "given", "known"), AXES.values(), ids=AXES)
@pytest.mark.sampled(2)
def test_a_step_along_an_axis_of_a_model_waits_where_the_documentation_says(
    degrees: dict[str, int], given: dict[str, Any], known: set[str]
) -> None:
    pytest.importorskip("transformers")
    from accel_testing.equivalence.causal_lms import tiny_llama, tiny_mixtral

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    made = tiny_mixtral(output_router_logits=True) if "ep_size" in degrees else tiny_llama()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters()))
    rows = torch.randint(64, (4, 8))

    def steps() -> None:
        for _ in range(2):
            accelerator.backward(model(input_ids=rows, labels=rows, **given).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    steps()
    with waits(by_operator="cp_size" not in degrees) as found:  # torch's causal mask permits no dispatch mode
        steps()
    assert modules(found) == known


@pytest.mark.ranks(2)
@pytest.mark.parametrize("watch", [False, True])
def test_a_meter_and_a_loader_wait_for_no_device(watch: bool) -> None:
    accelerator = Accelerator(cpu=True)
    made = nn.Linear(4, 1)
    loader = DataLoader(torch.randn(32, 4), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, batches = accelerator.prepare(made, torch.optim.AdamW(made.parameters()), loader)
    meter = accelerator.meter(every=1000, watch_loss=watch)
    meter._late = watch  # as where a device computes
    found: list[str] = []
    for epoch in range(2):
        with waits() if epoch else nullcontext(found) as found:
            for batch in batches:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                meter.step(loss)
                accelerator.gather_for_metrics(loss.detach())
    assert modules(found) == set()
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
