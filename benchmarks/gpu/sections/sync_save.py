"""Saves and loads that the caller waits for, over ``torch.save`` and ``torch.load`` of the same state."""

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.async_save import roomy, training


def run(bench: Bench) -> None:
    bench.attempt("save and load", lambda: save_and_load(bench))


def save_and_load(bench: Bench) -> None:
    size = bench.pick(4 * 10**9, 4 * 10**5)
    accelerator, model, optimizer, step = training(bench, size)
    step()
    place, kind = roomy(bench, size)
    folder = place / f"{bench.folder.name}-sync"
    folder.mkdir()
    file = folder / "raw.pt"

    def by_torch() -> None:
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.optimizer.state_dict()}
        with file.open("wb") as target:
            torch.save(state, target)
            target.flush()
            os.fsync(target.fileno())

    def by_torch_back() -> None:
        state = torch.load(file, map_location=bench.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.optimizer.load_state_dict(state["optimizer"])

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (lambda: accelerator.save_state(folder / "accel"), by_torch),
        "load": (lambda: accelerator.load_state(folder / "accel"), by_torch_back),
    }
    try:
        for name, (ours, raw) in pairs.items():
            times = {"accel": [0.0] * 3, "raw": [0.0] * 3}
            for number in range(3):
                for who, action in (("accel", ours), ("raw", raw)):
                    bench.synchronize()
                    began = time.perf_counter()
                    action()
                    bench.synchronize()
                    times[who][number] = time.perf_counter() - began
            accel, other = sorted(times["accel"])[1], sorted(times["raw"])[1]
            bench.row(f"to {kind}", f"{name}, accel", size / accel / 1e9, "GB/s")
            bench.row(f"to {kind}", f"{name}, torch", size / other / 1e9, "GB/s")
            bench.row(f"to {kind}", f"{name}, accel / torch", accel / other, "x")
        if bench.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            accelerator.load_state(folder / "accel")
            bench.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            bench.row(f"to {kind}", "device memory that a load adds", peak / 1e9, "GB")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
