"""Throughput of a prepared map-style loader as a part of that of the raw DataLoader which it was made from."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.harness import CLOCKS, Report, interleave, parser, ratio
from benchmarks.loaders import Blocks, Images, Rows, exhaust, preparers, unchanged

BATCH = 32


@dataclass(frozen=True)
class Case:
    """What is read: samples one by one, batches at once (nothing but the loader's own cost), or images."""

    name: str
    dataset: Any
    batches: int
    shuffle: bool = True
    workers: int = 0

    def loader(self, batches: int) -> "DataLoader[Any]":
        """The DataLoader of a script, over ``batches`` full batches."""
        return DataLoader(
            self.dataset(batches * BATCH),
            batch_size=BATCH,
            shuffle=self.shuffle,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=unchanged if self.dataset is Blocks else None,
        )


CASES = (
    Case("samples in order", Rows, 1000, shuffle=False),
    Case("samples shuffled", Rows, 1000),
    Case("batches in order", Blocks, 8000, shuffle=False),
    Case("batches shuffled", Blocks, 8000),
    Case("images", Images, 150),
    Case("images", Images, 150, workers=1),
    Case("images", Images, 150, workers=2),
)


def measure(case: Case, ranks: int, *, peers: bool, rounds: int, batches: int, clock: str) -> dict[str, Any]:
    """One row: each rank reads ``batches`` batches, the raw loader from a dataset of just these."""
    torch.set_num_threads(1)
    loaders = {"raw": case.loader(batches)}
    for name, prepare in preparers(ranks, peers=peers).items():
        loaders[name] = prepare(case.loader(batches * ranks))
    for name, loader in loaders.items():
        assert exhaust(loader) == batches, name
    variants = {name: lambda loader=loader: exhaust(loader) for name, loader in loaders.items()}
    times = interleave(variants, rounds, before=dist.barrier, clock=CLOCKS[clock])
    for loader in loaders.values():
        loader._iterator = None  # ends worker processes that were kept
    row: dict[str, Any] = {"what": case.name, "ranks": ranks, "workers": case.workers}
    row["raw_us"] = statistics.median(times["raw"]) / batches * 1e6
    row["goal"] = 0.97 if ranks == 1 else 0.95
    return row | {name: ratio(times, "raw", name) for name in loaders if name != "raw"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes to measure with")
    options.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, not of its workers")
    args = options.parse_args()
    names = ["accel", *(("accelerate", "fabric") if args.peers else ())]
    report = Report(
        "Batches per second, as a part of the raw DataLoader's (raw: µs a batch)",
        ["what", "ranks", "workers", "raw_us", "goal", *names],
    )
    from accel_testing import RankPool

    rounds = 2 if args.quick else args.rounds
    for ranks in args.ranks:
        with RankPool(ranks, timeout=900) as pool:
            for case in CASES:
                batches = max(case.batches // 20, 10) if args.quick else case.batches
                how = {"peers": args.peers, "rounds": rounds, "batches": batches, "clock": args.clock}
                report.add(**pool.run(measure, case, ranks, **how)[0])
    report.show(args.json)


if __name__ == "__main__":
    main()
