"""The planner's peak of memory against the allocator's."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import models
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import Workload
from benchmarks.planner import Shape, compared, convolutions, differences

STRATEGIES = ("single", "single+ckpt")


def run(bench: Bench) -> None:
    for precision in bench.pick(("bf16", "no", "bf16-true"), ("bf16",)):
        for shape in shapes(bench):
            if (shape, precision) == ("llama", "no"):
                continue  # more than the 139 GB of an H200
            for strategy in STRATEGIES[: None if precision == "bf16" else 1]:
                label = f"{shape} {precision} {strategy}"
                bench.attempt(label, partial(compare, bench, label, shapes(bench)[shape], strategy, precision))


def language(workload: Workload) -> Shape:
    """A workload's model and tokens as the planner's benchmark takes them."""

    def draw() -> Tensor:
        return workload.batch()[0]

    return Shape(workload.build, draw, draw)


def shapes(bench: Bench) -> dict[str, Shape]:
    images = bench.pick((64, 3, 112, 112), (2, 3, 8, 8))
    pictures: Callable[[], Tensor] = lambda: torch.randn(images)  # noqa: E731
    conv = Shape(partial(convolutions, bench.pick(256, 8)), pictures, lambda: torch.randint(10, images[:1]))
    found = {"llama": language(models.llama(bench)), "manual softmax": language(models.manual_gpt(bench))}
    found |= {"gpt": language(models.gpt(bench)), "conv": conv}
    return {"llama": found["llama"]} if bench.tiny else found


def compare(bench: Bench, label: str, shape: Shape, strategy: str, precision: str) -> None:
    torch.manual_seed(0)
    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    row = compared(shape, strategy, world=1, precision=precision, cpu=not bench.on_cuda)
    for part, off in differences(row).items():
        bench.row(label, f"{part}, off by", off / 100)
    bench.row(label, "error of the peak", abs(differences(row)["peak"]) / 100, goal="planner_peak")
    bench.row(label, "measured peak", row["measured"]["peak"] / 1e9, "GB")
    if bench.on_cuda:
        reserved = torch.cuda.max_memory_reserved() / row["measured"]["peak"]
        bench.row(label, "reserved / allocated at the peak", reserved, "x")
