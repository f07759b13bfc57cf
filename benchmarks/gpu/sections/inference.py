"""Models whose weights are not on the device: their outputs, and their time over the larger of link and compute."""

import copy
import tempfile
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.async_save import roomy
from benchmarks.gpu.sections.machine import pinned_h2d
from benchmarks.gpu.timing import Step, measure

KINDS = ("cpu", "disk", "map")


class Residual(nn.Module):
    """A block of one product: (rows, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> the same."""
        return torch.relu(self.linear(x)) + x


def run(bench: Bench) -> None:
    # Few rows: the link decides. Many: the products do.
    for rows in bench.pick((64, 16384), (4,)):
        for kind in KINDS:
            label = f"{kind}, {rows} rows"
            bench.attempt(label, partial(compared, bench, label, kind, rows))


def compared(bench: Bench, label: str, kind: str, rows: int) -> None:
    """The outputs bit for bit, and the median time of a forward."""
    blocks, width = bench.pick((16, 4096), (4, 32))
    torch.manual_seed(0)
    with bench.device:
        plain = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        x = torch.randn(rows, width)
    size = sum(parameter.nbytes for parameter in plain.parameters())
    place, _ = roomy(bench, size)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=place) as folder:
        expected = plain(x)
        compute = median(bench, partial(plain, x))
        other = offloaded(bench, copy.deepcopy(plain).cpu(), kind, folder)
        del plain
        bench.clear()
        if bench.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        found = other(x)
        taken = median(bench, partial(other, x))
        bench.row(label, "outputs are equal bit for bit", torch.equal(found, expected))
        part = 2 / 3 if kind == "map" else 1.0  # of the weights are not on the device
        link = part * size / pinned_h2d(bench, bench.pick(2**28, 2**16))
        bench.row(label, "forward over the larger of compute and link", taken / max(compute, link), "x")
        bench.row(label, "forward", taken * 1e3, "ms")
        if bench.on_cuda:
            bench.row(label, "peak memory / weights", torch.cuda.max_memory_allocated() / size, "x")
    if not torch.equal(found, expected):
        raise AssertionError(f"{label}: outputs differ by {float((found - expected).abs().max()):.3g}")


def offloaded(bench: Bench, model: nn.Module, kind: str, folder: str) -> Any:
    """The model with its weights elsewhere: all in host memory, all on disk, or a third each, one on the device."""
    from accel import cpu_offload, disk_offload, dispatch_model

    if kind == "cpu":
        return cpu_offload(model, execution_device=bench.device)
    if kind == "disk":
        return disk_offload(model, folder, execution_device=bench.device)
    here: int | str = (bench.device.index or 0) if bench.on_cuda else "cpu"
    places = (here, "cpu", "disk")
    count = len(list(model.children()))
    named = {str(number): places[3 * number // count] for number in range(count)}
    return dispatch_model(model, named, main_device=here, offload_dir=folder)


def median(bench: Bench, forward: Step) -> float:
    """Median seconds of a forward."""
    return measure(bench, {"forward": forward}, steps=1, rounds=5).median("forward")
