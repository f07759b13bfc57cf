"""Time that dispatching adds to the work on a batch, against a raw ``broadcast`` of it by the rank that reads."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Report, added, interleave, parser, ratio
from benchmarks.loaders import accel, accelerate, unchanged

BATCH = 8
"""Samples of a batch of one rank."""
SIZES = (2 << 10, 16 << 10, 128 << 10, 1 << 20)
"""Bytes of a sample."""


class Slab(Dataset[torch.Tensor]):
    """Batches of float32 rows that are there already, so that sending them is what is measured."""

    def __init__(self, size: int, row: int) -> None:
        self.size = size
        self.rows = torch.randn(2 * BATCH, row // 4)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.rows[: len(indices)]


@dataclass(frozen=True)
class Work:
    """What a rank does with each batch: look at it, and multiply matrices for about ``cost`` times 0.3 ms."""

    cost: int

    def __call__(self, batch: torch.Tensor) -> None:
        batch[0, 0].item()
        square = torch.full((192, 192), 0.01)
        for _ in range(self.cost):
            square = square @ square


def measure(row: int, *, cost: int, peers: bool, rounds: int, steps: int) -> dict[str, Any]:
    """One row, as rank 0 sees it; all ranks meet before and after what is timed."""
    torch.set_num_threads(1)
    world, rank, work = dist.get_world_size(), dist.get_rank(), Work(cost)
    dataset = Slab(steps * world * BATCH, row)

    def raw() -> None:
        batches = iter(DataLoader(dataset, batch_size=world * BATCH, collate_fn=unchanged)) if rank == 0 else None
        for _ in range(steps):
            whole = torch.empty(world * BATCH, row // 4) if batches is None else next(batches)
            dist.broadcast(whole, 0)
            work(whole[rank * BATCH : (rank + 1) * BATCH])
        dist.barrier()

    def read(loader: Any) -> None:
        count = 0
        for batch in loader:
            work(batch)
            count += 1
        assert count == steps
        dist.barrier()

    def alone() -> None:
        for _ in range(steps):
            work(dataset.rows)
        dist.barrier()

    variants = {"alone": alone, "raw": raw}
    for name, make in {"accel": accel, **({"accelerate": accelerate} if peers else {})}.items():
        loader = make(world, dispatch_batches=True)(DataLoader(dataset, batch_size=BATCH, collate_fn=unchanged))
        variants[name] = lambda loader=loader: read(loader)  # type: ignore[misc]
    times = interleave(variants, rounds, before=dist.barrier)
    adds = {name: added(times, name, "alone", per=steps) for name in times}
    found: dict[str, Any] = {"sample": f"{row >> 10} KiB", "work_us": statistics.median(times["alone"]) / steps * 1e6}
    found |= {"raw_adds_us": adds["raw"], "goal": 0.7}
    others = [name for name in times if name not in ("raw", "alone")]
    found |= {name: adds[name] / adds["raw"] for name in others}
    return found | {f"{name}_whole": ratio(times, name, "raw") for name in others}


def main() -> None:
    args = parser(__doc__).parse_args()
    columns = ["sample", "work_us", "raw_adds_us", "goal", "accel", "accel_whole"]
    columns += ["accelerate", "accelerate_whole"] if args.peers else []
    title = f"What dispatching adds to the work on a batch of {BATCH} a rank, and the whole, as ratios to broadcasting"
    report = Report(title, columns)
    from accel_testing import RankPool

    rounds = 2 if args.quick else args.rounds
    with RankPool(2, timeout=900) as pool:
        for cost in (0, 3):
            for row in SIZES:
                steps = max(40, min(300, (64 << 20) // (row * BATCH))) // (10 if args.quick else 1)
                report.add(**pool.run(measure, row, cost=cost, peers=args.peers, rounds=rounds, steps=steps)[0])
    report.show(args.json)


if __name__ == "__main__":
    main()
