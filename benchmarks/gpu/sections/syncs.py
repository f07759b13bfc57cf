"""Waits of the host for the device in the steps of each kind of loop, with file and line."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.bench import Bench

Step = Callable[[int], object]
WIDTH = 64
# What the documentation says of it: it reads one number of the device in each step.
ALLOWED = {"fp16": 1}


def run(bench: Bench) -> None:
    for name, make in LOOPS.items():
        bench.attempt(name, partial(look, bench, name, make))
    bench.attempt("gather_for_metrics and loader", partial(look_at_loader, bench, "", batch_size=16))
    bench.attempt("global batch size", partial(look_at_loader, bench, ", global batch size", global_batch_size=16))


def parts(bench: Bench, **options: Any) -> tuple[Any, Any, Any, torch.Tensor]:
    """An Accelerator, a prepared model and optimizer, and a batch."""
    accelerator = bench.accelerator(**options)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, stepping = accelerator.prepare(model, optimizer)
    return accelerator, prepared, stepping, torch.randn(8, WIDTH, device=bench.device)


def plain(bench: Bench, *, clip: bool = False, weight: Any = None, **options: Any) -> Step:
    accelerator, model, optimizer, batch = parts(bench, **options)
    if weight is not None:
        weight = weight(bench.device)

    def step(number: int) -> None:
        with accelerator.accumulate(model):
            loss = model(batch).square()
            if weight is None:
                accelerator.backward(loss.mean())
            else:
                accelerator.backward(loss.sum(), weight=weight)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def scheduled(bench: Bench) -> Step:
    accelerator, model, optimizer, batch = parts(bench)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0))

    def step(number: int) -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def logged(bench: Bench) -> Step:
    accelerator, model, optimizer, batch = parts(bench, project_dir=bench.folder / "log")
    accelerator.init_trackers("syncs")

    def step(number: int) -> None:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach()}, step=number)

    return step


def metered(bench: Bench, *, watch: bool) -> Step:
    accelerator, model, optimizer, batch = parts(bench)
    meter = accelerator.meter(every=1000, watch_loss=watch)

    def step(number: int) -> None:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss)

    return step


def sharded(bench: Bench) -> Step:
    from accel import FullyShardedDataParallelPlugin

    return plain(bench, fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision="bf16", clip=True)


LOOPS: dict[str, Callable[[Bench], Step]] = {
    "plain": plain,
    "bf16": partial(plain, mixed_precision="bf16"),
    "fp16": partial(plain, mixed_precision="fp16"),
    "clip": partial(plain, clip=True),
    "accumulate 4": partial(plain, gradient_accumulation_steps=4),
    "weight as a number": partial(plain, weight=lambda device: 8),
    "weight as a tensor": partial(plain, weight=lambda device: torch.tensor(8.0, device=device)),
    "scheduler": scheduled,
    "log": logged,
    "meter": partial(metered, watch=False),
    "meter with losses watched": partial(metered, watch=True),
    "FSDP2": sharded,
}


@contextmanager
def seen(bench: Bench) -> Iterator[Counter[str]]:
    """Collects file and line of each wait for the device in the block; sees none on a CPU, which has none."""
    found: Counter[str] = Counter()
    if not bench.on_cuda:
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{one.filename}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message))


def look(bench: Bench, name: str, make: Callable[[Bench], Step]) -> None:
    step, measured = make(bench), bench.pick(20, 4)
    for number in range(5):
        step(number)
    bench.synchronize()
    with seen(bench) as places:
        for number in range(5, 5 + measured):
            step(number)
    report(bench, name, places, measured)


def report(bench: Bench, name: str, places: Counter[str], steps: int) -> None:
    if not bench.on_cuda:
        bench.row(name, "steps run, waits not looked for", steps)
        return
    waits = sum(places.values()) / steps
    bench.row(name, "waits a step", waits, "", goal=None if name in ALLOWED else "hidden_syncs")
    if name in ALLOWED:
        bench.row(name, "waits a step beyond those documented", max(0.0, waits - ALLOWED[name]), goal="hidden_syncs")
    for place, count in places.most_common(10):
        bench.row(name, place, count / steps, "waits a step")


def look_at_loader(bench: Bench, suffix: str, *, batch_size: int = 1, global_batch_size: int | None = None) -> None:
    """A pass over a prepared loader, whose copies run on a stream of their own."""
    from accel import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(global_batch_size=global_batch_size)
    accelerator, model, optimizer, _ = parts(bench, dataloader_config=configuration)
    data = TensorDataset(torch.randn(16 * bench.pick(25, 8), WIDTH))
    loader = accelerator.prepare(DataLoader(data, batch_size=batch_size))
    with seen(bench) as places:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    report(bench, f"loader{suffix}", places, len(loader))
    with seen(bench) as places:
        for (batch,) in loader:
            accelerator.gather_for_metrics(model(batch).detach())
    report(bench, f"gather_for_metrics{suffix}", places, len(loader))
