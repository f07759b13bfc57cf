"""Copies of batches to the device under the computation of the step, and whether batches arrive as they were."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.machine import pinned_h2d


def run(bench: Bench) -> None:
    size = bench.pick(2**28, 2**16)
    for factor in (2.0, 1.0, 0.5):
        bench.attempt(f"compute {factor:g}x of the copy", partial(exposure, bench, size, factor))
    bench.attempt("values", partial(values, bench))


def fixed(batch: Any, count: int) -> "DataLoader[Any]":
    """A loader that gives the same memory each time, so that only its copies cost anything."""
    return DataLoader(range(count), batch_size=1, collate_fn=lambda rows: batch)  # type: ignore[arg-type]


def prefetched(bench: Bench, loader: Iterable[Tensor]) -> Iterator[Tensor]:
    """What a careful person writes by hand: one batch ahead, on a stream of its own."""
    stream = torch.cuda.Stream()

    def issue(batch: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            return batch.to(bench.device, non_blocking=True)

    batches = iter(loader)
    following: Tensor | None = issue(next(batches))
    while following is not None:
        current = following
        torch.cuda.current_stream().wait_stream(stream)
        current.record_stream(torch.cuda.current_stream())
        later = next(batches, None)
        following = None if later is None else issue(later)
        yield current


def first_tensor(batch: Any) -> Tensor:
    """A tensor of a nested batch."""
    if isinstance(batch, Tensor):
        return batch
    return first_tensor(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def exposure(bench: Bench, size: int, factor: float) -> None:
    """The part of each copy by which a step becomes longer: (t - t_resident) / t_copy.

    The first copy of a pass has nothing to run under, so it is taken off.
    """
    count = bench.pick(30, 6)
    copy = size / pinned_h2d(bench, size)
    compute = busy(bench, factor * copy)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=bench.on_cuda)
    resident = pinned.to(bench.device)
    half = pinned[: size // 2]
    accelerator = bench.accelerator()
    variants: dict[str, Callable[[], Iterable[Any]]] = {"resident": lambda: [resident] * count}
    loaders = {
        "accel, pinned": fixed(pinned, count),
        "accel, nested": fixed({"a": half, "b": [half]}, count),
    }
    if factor == 1:  # copies of pageable memory are slow, and known to be
        loaders["accel, pageable"] = fixed(pageable, count)
        variants["raw, .to()"] = lambda: (batch.to(bench.device) for batch in fixed(pageable, count))
    for name, loader in loaders.items():
        prepared = accelerator.prepare(loader)
        variants[name] = partial(iter, prepared)
    if bench.on_cuda:
        variants["raw, own prefetch"] = lambda: prefetched(bench, fixed(pinned, count))
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, 3 if factor >= 1 else 1):
        for name, batches in variants.items():
            seconds = passed(bench, batches(), compute)
            if number >= 0:
                spent[name].append(seconds)
    best = {name: sorted(times)[len(times) // 2] for name, times in spent.items()}
    label = f"compute {factor:g}x of the copy"
    bench.row(label, "copy of one batch", copy * 1e3, "ms")
    for name, seconds in best.items():
        if name == "resident":
            bench.row(label, "step without a copy", seconds / count * 1e3, "ms")
            continue
        exposed = (seconds - best["resident"] - copy) / ((count - 1) * copy)
        held = "h2d_exposed" if name in ("accel, pinned", "accel, nested") and factor >= 1 else None
        bench.row(label, f"{name}: exposed part of a copy", exposed, "", goal=held)


def busy(bench: Bench, seconds: float) -> Callable[[], object]:
    """A computation on the device that takes about so long."""
    width = bench.pick(2048, 64)
    weights = torch.randn(width, width, device=bench.device) / width**0.5

    def repeat(times: int) -> Tensor:
        x: Tensor = weights
        for _ in range(times):
            x = weights @ x
        return x

    repeat(3)
    bench.synchronize()
    began = time.perf_counter()
    repeat(50)
    bench.synchronize()
    one = (time.perf_counter() - began) / 50
    return partial(repeat, max(1, round(seconds / one)))


def passed(bench: Bench, batches: Iterable[Any], compute: Callable[[], object]) -> float:
    """Seconds of a pass that uses one byte of each batch."""
    bench.synchronize()
    began = time.perf_counter()
    for batch in batches:
        first_tensor(batch)[:1].add(1)
        compute()
    bench.synchronize()
    return time.perf_counter() - began


def values(bench: Bench) -> None:
    """Every batch holds its number, also where the device is late and memory is used again."""
    count, rows = bench.pick(2000, 50), bench.pick(2**20, 2**8)
    loader: DataLoader[Any] = DataLoader(
        range(count),  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=lambda numbers: torch.full((rows + numbers[0] % 7,), float(numbers[0])),
    )
    found = []
    for number, batch in enumerate(bench.accelerator().prepare(loader)):
        if bench.on_cuda and number % 3 == 0:
            torch.cuda._sleep(200_000)
        found.append(torch.stack([batch.amin(), batch.amax()]))
    seen = torch.stack(found).cpu()
    wrong = int((seen != torch.arange(float(count)).unsqueeze(1)).any(1).sum())
    bench.row("values", f"wrong batches of {count}", wrong)
    if wrong:
        raise AssertionError(f"{wrong} of {count} batches did not hold their values")
