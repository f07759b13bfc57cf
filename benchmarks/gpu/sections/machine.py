"""Rates of the machine, the denominators of the other sections: copies, arithmetic, disks."""

import os
import platform
import tempfile
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, NeedsCuda

GB = 1e9


def run(bench: Bench) -> None:
    bench.note("machine", facts=facts(bench))
    bench.attempt("copies", lambda: copies(bench), cuda="pinned memory and a link to the device")
    bench.attempt("arithmetic", lambda: arithmetic(bench))
    bench.attempt("fp8 arithmetic", lambda: fp8_arithmetic(bench), cuda="matrix units that compute in 8 bits")
    for place in (tempfile.gettempdir(), "/dev/shm"):
        bench.attempt(f"disk {place}", partial(disk, bench, Path(place)))


def facts(bench: Bench) -> dict[str, str]:
    """Versions of what is measured and of what it is measured with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if bench.on_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {"gpu": properties.name, "memory": f"{properties.total_memory / GB:.0f} GB"}
        found |= {"cuda": str(torch.version.cuda or torch.version.hip)}
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    others = ("accelerate", "lightning-fabric", "lightning", "torchao", "deepspeed", "transformers")
    for name in ("accel-training", *others):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def copy_rate(bench: Bench, source: torch.Tensor, target: torch.Tensor, repeats: int = 5) -> float:
    """Bytes per second of ``target.copy_(source)``, the best of several."""
    best = float("inf")
    for _ in range(repeats):
        bench.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        bench.synchronize()
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


def pinned_d2h(bench: Bench, size: int = 2**29) -> float:
    """Bytes per second from the device into pinned memory."""
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return copy_rate(bench, source, torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_cuda))


def pinned_h2d(bench: Bench, size: int = 2**29) -> float:
    """Bytes per second from pinned memory to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_cuda)
    return copy_rate(bench, source, torch.empty(size, dtype=torch.uint8, device=bench.device))


def copies(bench: Bench) -> None:
    size = bench.pick(2**30, 2**24)
    device = torch.empty(size, dtype=torch.uint8, device=bench.device)
    pageable = torch.ones(size, dtype=torch.uint8)
    began = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bench.row("pinned memory", "seconds to allocate 1 GB", (time.perf_counter() - began) * GB / size, "s")
    pairs = {
        "H2D pinned": (pinned, device),
        "H2D pageable": (pageable, device),
        "D2H pinned": (device, pinned),
        "D2H pageable": (device, pageable),
        "D2D": (device, torch.empty_like(device)),
    }
    for name, (source, target) in pairs.items():
        bench.row(name, "bandwidth", copy_rate(bench, source, target) / GB, "GB/s")
    other, second = torch.empty_like(pinned, pin_memory=True), torch.empty_like(device)
    stream = torch.cuda.Stream()
    bench.synchronize()
    began = time.perf_counter()
    device.copy_(pinned, non_blocking=True)
    with torch.cuda.stream(stream):
        other.copy_(second, non_blocking=True)
    bench.synchronize()
    bench.row("both directions", "bandwidth", 2 * size / (time.perf_counter() - began) / GB, "GB/s")


def arithmetic(bench: Bench) -> None:
    width = bench.pick(8192, 128)
    a, b = (torch.randn(width, width, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    bench.row("bf16 matmul", "arithmetic", rate(bench, lambda: a @ b, 2 * width**3) / 1e12, "TFLOP/s")


def fp8_arithmetic(bench: Bench) -> None:
    if torch.cuda.get_device_capability(bench.device) < (8, 9):
        raise NeedsCuda("a GPU of compute capability 8.9 or later for fp8")
    width = bench.pick(8192, 128)
    one = torch.ones((), device=bench.device)
    a, b = (torch.randn(width, width, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))

    def product() -> object:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    bench.row("fp8 matmul", "arithmetic", rate(bench, product, 2 * width**3) / 1e12, "TFLOP/s")


def rate(bench: Bench, compute, operations: float, repeats: int = 10) -> float:  # type: ignore[no-untyped-def]
    """Operations per second."""
    compute()
    bench.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        compute()
    bench.synchronize()
    return operations * repeats / (time.perf_counter() - began)


def disk(bench: Bench, folder: Path) -> None:
    bench.row(str(folder), "write and fsync", write_rate(folder, bench.pick(2**30, 2**22)) / GB, "GB/s")


def write_rate(folder: Path, size: int) -> float:
    """Bytes per second of one write and fsync."""
    content = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(max(size // len(content), 1)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - began)
