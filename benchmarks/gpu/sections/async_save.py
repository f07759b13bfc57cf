"""Asynchronous saves: how long the call blocks, the loss of speed meanwhile, and whether the values are the call's."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.machine import pinned_d2h
from benchmarks.gpu.timing import block


def run(bench: Bench) -> None:
    bench.attempt("snapshot", partial(snapshot, bench))
    for gigabytes in (4, 12):
        size = bench.pick(gigabytes * 10**9, gigabytes * 10**5)
        place, kind = roomy(bench, size)
        label = f"{gigabytes} GB to {kind}"
        bench.attempt(label, partial(saved, bench, label, size, place))
    size = bench.pick(4 * 10**9, 4 * 10**5)
    bench.attempt("4 GB to disk", partial(saved, bench, "4 GB to disk", size, bench.folder))


def snapshot(bench: Bench) -> None:
    """Rate of a save's copy into host memory: of emptying pinned blocks, by the number of threads, and without them."""
    from accel_ckpt.saving.host_snapshot import copy_into
    from accel_state.device.pinned import pin_in_place

    size = bench.pick(2**31, 2**20)
    tensors = [torch.zeros(size // 32, dtype=torch.uint8, device=bench.device) for _ in range(32)]
    buffer = torch.zeros(size, dtype=torch.uint8)
    for threads in (1, 4, 8, 16):
        taken = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(3):
                bench.synchronize()
                began = time.perf_counter()
                copy_into(buffer, tensors, threads=threads, pool=pool)
                taken.append(time.perf_counter() - began)
        bench.row("snapshot", f"bandwidth with {threads} threads", size / min(taken) / 1e9, "GB/s")
    if not bench.on_cuda:
        return
    began = time.perf_counter()
    unpin = pin_in_place(buffer)
    bench.row("snapshot", "pinning the buffer", (time.perf_counter() - began) / size * 1e9, "s/GB")
    taken = []
    for _ in range(3):
        bench.synchronize()
        began = time.perf_counter()
        copy_into(buffer, tensors, pinned=unpin is not None)
        taken.append(time.perf_counter() - began)
    bench.row("snapshot", "bandwidth to the pinned buffer", size / min(taken) / 1e9, "GB/s")


def roomy(bench: Bench, size: int) -> tuple[Path, str]:
    """A folder in memory with room for two checkpoints of ``size`` bytes and a half, otherwise one on the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2.5 * size:
        return memory, "memory"
    return bench.folder, "disk"


def training(bench: Bench, size: int) -> tuple[Any, Any, Any, Any]:
    """A run whose model and AdamW states take about ``size`` bytes, its step, and what they are."""
    width = bench.pick(4096, 64)
    layers = max(2, round(size / (12 * width * width)))
    torch.manual_seed(0)
    with torch.device(bench.device):
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accelerator = bench.accelerator(mixed_precision="bf16")
    prepared, stepping = accelerator.prepare(model, optimizer)
    batch = torch.randn(bench.pick(2048, 4), width, device=bench.device)

    def step() -> None:
        accelerator.backward(prepared(batch).square().mean())
        stepping.step()
        stepping.zero_grad()

    return accelerator, prepared, stepping, step


def values_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters and moments."""
    states = [state for state in optimizer.state.values()]
    return [*model.parameters(), *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]


def saved(bench: Bench, label: str, size: int, place: Path) -> None:
    folder = place / f"{bench.folder.name}-checkpoints"
    try:
        save_thrice(bench, label, size, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_thrice(bench: Bench, label: str, size: int, folder: Path) -> None:
    """Saves before the first step, then three times; the last while its values are changed at once."""
    accelerator, model, optimizer, step = training(bench, size)
    began = time.perf_counter()
    accelerator.save_state(folder / "new", asynchronous=True)
    bench.row(label, "stall before the first step", time.perf_counter() - began, "s")
    accelerator.last_save.wait(60)
    bench.row(label, "bytes before the first step", accelerator.last_save.nbytes / 1e9, "GB")
    shutil.rmtree(folder / "new")
    alone = block(bench, step, 2).wall  # the optimizer's states exist from here on
    alone = block(bench, step, bench.pick(10, 2)).wall
    bandwidth = pinned_d2h(bench, bench.pick(2**29, 2**20))
    kept: list[torch.Tensor] = []
    for number, name in enumerate(("first", "second", "third")):
        bench.synchronize()
        if name == "third":
            kept = [value.detach().clone() for value in values_of(model, optimizer)]
            bench.synchronize()
        began = time.perf_counter()
        accelerator.save_state(folder / str(number), asynchronous=True)
        stall = time.perf_counter() - began
        handle = accelerator.last_save
        bound = handle.nbytes / bandwidth
        steps = 0
        during = time.perf_counter()
        while steps < 3 or (not handle.done() and time.perf_counter() - during < 6):
            step()
            bench.synchronize()
            steps += 1
        during = (time.perf_counter() - during) / steps
        handle.wait(60)
        bench.row(label, f"{name} stall", stall, "s")
        goal = "second_stall" if name == "second" else None
        bench.row(label, f"{name} stall / (bytes / pinned bandwidth)", stall / bound, "x", goal=goal)
        bench.row(label, f"step during the {name} save / alone", during / alone, "x")
        if number:
            shutil.rmtree(folder / str(number - 1))
    bench.row(label, "bytes of a save", accelerator.last_save.nbytes / 1e9, "GB")
    if bench.on_cuda and hasattr(torch.cuda, "host_memory_stats"):
        peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        bench.row(label, "pinned memory at its peak / state", peak / accelerator.last_save.nbytes, "x")
    accelerator.load_state(folder / "2")
    pairs = zip(values_of(model, optimizer), kept, strict=True)
    wrong = sum(not torch.equal(now, then) for now, then in pairs)
    bench.row(label, "tensors that differ from those of the call", wrong)
    if wrong:
        raise AssertionError(f"{wrong} tensors of the checkpoint are not those of the moment of the call")
