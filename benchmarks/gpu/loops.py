"""One training step written by hand, with accel, with Accelerate and with Lightning Fabric, on one device."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import Workload
from benchmarks.gpu.timing import Step


@dataclass(frozen=True)
class StepCase:
    """What a step does besides forward, backward and update."""

    name: str
    precision: str = "no"
    clip: bool = False
    accumulate: int = 1
    fused: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)


PLAIN = StepCase("plain")
BF16 = StepCase("bf16", precision="bf16")
CASES = (
    PLAIN,
    BF16,
    StepCase("fp16", precision="fp16", fused=True),
    StepCase("clip", clip=True),
    StepCase("accumulate 4", accumulate=4),
)


def optimizer_of(bench: Bench, model: nn.Module, case: StepCase) -> torch.optim.Optimizer:
    """AdamW, fused on a GPU if the case wants it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True if case.fused and bench.on_cuda else None)


def moved(bench: Bench, workload: Workload) -> tuple[torch.Tensor, ...]:
    """A batch on the device."""
    return tuple(tensor.to(bench.device) for tensor in workload.batch())


def raw_step(bench: Bench, workload: Workload, case: StepCase, wrap: Callable[[nn.Module], Any] | None = None) -> Step:
    """What a careful person writes by hand; ``wrap`` compiles or converts the model."""
    built = workload.built(bench.device)
    optimizer = optimizer_of(bench, built, case)
    model = built if wrap is None else wrap(built)
    batch = moved(bench, workload)
    scaler = torch.amp.GradScaler(bench.device.type) if case.precision == "fp16" else None
    kind, position = bench.device.type, cycle(range(1, case.accumulate + 1))

    def step() -> None:
        due = next(position) == case.accumulate
        with nullcontext() if case.autocast is None else torch.autocast(kind, dtype=case.autocast):
            loss = workload.loss(model, batch)
        loss = loss / case.accumulate if case.accumulate > 1 else loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not due:
            return
        if case.clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(built.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def wrapped_step(bench: Bench, workload: Workload, case: StepCase, accelerator: Any) -> Step:
    """The loop of the README, for accel and for Accelerate."""
    model = workload.built(bench.device)
    optimizer = optimizer_of(bench, model, case)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = moved(bench, workload)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(workload.loss(model, batch))
            if case.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def accel_step(bench: Bench, workload: Workload, case: StepCase, **options: Any) -> Step:
    """With accel."""
    accelerator = bench.accelerator(
        mixed_precision=case.precision, gradient_accumulation_steps=case.accumulate, **options
    )
    return wrapped_step(bench, workload, case, accelerator)


def accelerate_step(bench: Bench, workload: Workload, case: StepCase) -> Step:
    """With Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is that of the process
    accelerator = Accelerator(
        cpu=not bench.on_cuda, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulate
    )
    return wrapped_step(bench, workload, case, accelerator)


def fabric_step(bench: Bench, workload: Workload, case: StepCase) -> Step:
    """With Lightning Fabric."""
    from lightning_fabric import Fabric

    named = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[case.precision]
    engine = Fabric(accelerator="cuda" if bench.on_cuda else "cpu", devices=1, precision=named)  # type: ignore[arg-type]
    built = workload.built(bench.device)
    model: Any
    optimizer: Any
    model, optimizer = engine.setup(built, optimizer_of(bench, built, case))
    batch = moved(bench, workload)
    position = cycle(range(1, case.accumulate + 1))

    def step() -> None:
        due = next(position) == case.accumulate
        with engine.no_backward_sync(model, enabled=False):
            loss = workload.loss(model, batch)
            engine.backward(loss / case.accumulate if case.accumulate > 1 else loss)
        if due:
            if case.clip:
                engine.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


PEERS: Mapping[str, Callable[[Bench, Workload, StepCase], Step]] = {
    "accelerate": accelerate_step,
    "fabric": fabric_step,
}
