"""``load_state`` of a whole run against one warm read of the same bytes, by strategy.

The model and Adam's states are loaded again and again into the same Accelerator, out of the page cache. The base is
the least that each rank has to do: read its share of the bytes into memory that is allocated already. Both take turns.
"""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint import BLOCK, MIB
from benchmarks.harness import Report, interleave, parser, ratio

CASES = {"single": 1, "ddp": 2, "fsdp": 2}
GOAL = 1.3


def trained(strategy: str, size: int) -> tuple[Any, int]:
    """An Accelerator whose model and Adam's states take about ``size`` bytes, and how many those are."""
    from accel import Accelerator

    width = 1024 if size >= 64 * MIB else 64
    layers = max(1, size // (3 * 4 * width * width))
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(1, width)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, nbytes


def measure(folder: str, *, strategy: str, size: int, rounds: int) -> dict[str, Any]:
    """One row, as rank 0 sees it."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    accelerator, nbytes = trained(strategy, size)
    accelerator.save_state(Path(folder) / "saved")
    share = nbytes // dist.get_world_size() if strategy == "fsdp" else nbytes
    raw = Path(folder) / f"raw{dist.get_rank()}"
    raw.write_bytes(bytes(share))
    view = memoryview(torch.ones(share, dtype=torch.uint8).numpy())

    def read() -> None:
        with raw.open("rb", buffering=0) as file:
            position = 0
            while position < share:
                position += file.readinto(view[position : position + BLOCK])
        dist.barrier()

    variants = {"base": read, "accel": lambda: accelerator.load_state(Path(folder) / "saved") and None}
    times = interleave(variants, rounds, before=dist.barrier)
    row = {"what": strategy, "ranks": dist.get_world_size(), "mib": nbytes / MIB, "goal": GOAL}
    return row | {"base_ms": statistics.median(times["base"]) * 1e3, "accel": ratio(times, "accel", "base")}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=288, help="size of the states in MiB")
    options.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, help="strategies to measure")
    options.add_argument("--folder", type=Path, default=None, help="where to write (the system's temporary folder)")
    args = options.parse_args()
    from accel_testing import RankPool

    report = Report("load_state, as a ratio to a warm read", ["what", "ranks", "mib", "base_ms", "goal", "accel"])
    rounds, size = (1, 4 * MIB) if args.quick else (args.rounds, args.mib * MIB)
    for strategy in args.cases:
        with RankPool(CASES[strategy], timeout=1800) as pool, tempfile.TemporaryDirectory(dir=args.folder) as folder:
            report.add(**pool.run(measure, folder, strategy=strategy, size=size, rounds=rounds)[0])
    report.show(args.json)


if __name__ == "__main__":
    main()
