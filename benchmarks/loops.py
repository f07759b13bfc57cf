"""The same training step written four times: raw PyTorch, accel, Accelerate, Lightning Fabric."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What a step does besides forward, backward and update."""

    name: str
    bf16: bool = False
    accumulate: int = 1
    clip: bool = False


CASES = (Case("plain"), Case("bf16", bf16=True), Case("accumulate 4", accumulate=4), Case("clip", clip=True))


def parts(width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    """A model so small that the step is nearly all overhead, its optimizer, a schedule and one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, scheduler, torch.randn(8, width)


def raw(case: Case, ranks: int) -> Step:
    """What a careful person writes by hand."""
    model, optimizer, scheduler, batch = parts()
    if ranks > 1:
        model = DistributedDataParallel(model)
    position = cycle(range(1, case.accumulate + 1))

    def step() -> None:
        due = next(position) == case.accumulate
        quiet = model.no_sync() if ranks > 1 and not due else nullcontext()
        with quiet:
            if case.bf16:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = model(batch)
                output = output.float()
            else:
                output = model(batch)
            loss = output.square().mean()
            (loss / case.accumulate if case.accumulate > 1 else loss).backward()
        if due:
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


def accel(case: Case, ranks: int) -> Step:
    """The loop of the README."""
    from accel import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.accumulate
    )
    return _accelerated(accelerator, case)


def accelerate(case: Case, ranks: int) -> Step:
    """The same with Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.accumulate
    )
    return _accelerated(accelerator, case)


def _accelerated(accelerator: Any, case: Case) -> Step:
    model, optimizer, scheduler, batch = parts()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step() -> None:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if case.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


def fabric(case: Case, ranks: int) -> Step:
    """The same with Lightning Fabric."""
    engine = fabric_engine(ranks, precision="bf16-mixed" if case.bf16 else "32-true")
    model, optimizer, scheduler, batch = parts()
    model, optimizer = engine.setup(model, optimizer)
    position = cycle(range(1, case.accumulate + 1))

    def step() -> None:
        due = next(position) == case.accumulate
        with engine.no_backward_sync(model, enabled=ranks > 1 and not due):
            loss = model(batch).square().mean()
            engine.backward(loss / case.accumulate if case.accumulate > 1 else loss)
        if due:
            if case.clip:
                engine.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


def fabric_engine(ranks: int, **options: Any) -> Any:
    """A Fabric on the processes that there are."""
    from lightning_fabric import Fabric

    if ranks > 1:
        from lightning_fabric.plugins.environments import TorchElasticEnvironment

        options |= {"devices": ranks, "strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
    else:
        options |= {"devices": 1}
    engine = Fabric(accelerator="cpu", **options)
    engine.launch()
    return engine


def variants(peers: bool) -> Iterator[tuple[str, Callable[[Case, int], Step]]]:
    """Raw first; the peers only where they are asked for."""
    yield "raw", raw
    yield "accel", accel
    if peers:
        yield "accelerate", accelerate
        yield "fabric", fabric
