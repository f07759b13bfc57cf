"""Throughput of a prepared map-style loader as a part of that of the raw DataLoader which it was made from.

The loaders are read in turns of some milliseconds, so that whatever else slows the machine slows all of them alike; one
with workers reads whole passes, for its workers would read on in the turns of the others. A second raw loader among
them shows what the comparison of equal loaders gives: a difference below that is none.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.harness import Report, Rounds, parser, ratio
from benchmarks.loaders import Blocks, Images, Rows, exhaust, preparers, unchanged

BATCH = 32
TURNS = 20
"""Of a pass, for loaders without workers."""


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
    Case("batches in order", Blocks, 4000, shuffle=False),
    Case("batches shuffled", Blocks, 4000),
    Case("images", Images, 100),
    Case("images", Images, 100, workers=1),
    Case("images", Images, 100, workers=2),
)


def processor_time(workers: Sequence[int]) -> float:
    """Seconds that processors worked for this process and its workers (Linux has such clocks of other processes)."""
    return time.process_time() + sum(time.clock_gettime(~worker << 3 | 2) for worker in workers)


def passes(loaders: Mapping[str, Any], rounds: int, turn: int) -> tuple[Rounds, Rounds]:
    """Seconds of each pass of each loader, on the clock and in processor time, read ``turn`` batches at a time."""
    names = list(loaders)
    wall: Rounds = {name: [] for name in names}
    busy: Rounds = {name: [] for name in names}
    workers = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    for number in range(rounds):
        for times in (wall, busy):
            for name in names:
                times[name].append(0.0)
        reading: dict[str, Any] = {}
        left = names[number % len(names) :] + names[: number % len(names)]
        gc.collect()
        gc.disable()
        while left:
            for name in list(left):
                dist.barrier()
                before, busy_before = time.perf_counter(), processor_time(workers)
                if name not in reading:
                    reading[name] = iter(loaders[name])
                read = exhaust(islice(reading[name], turn))
                busy[name][-1] += processor_time(workers) - busy_before
                wall[name][-1] += time.perf_counter() - before
                if read < turn:
                    left.remove(name)
        gc.enable()
    return wall, busy


def measure(case: Case, ranks: int, *, peers: bool, rounds: int, batches: int) -> dict[str, Any]:
    """One row, as one rank sees it: each reads ``batches`` batches, the raw loaders from a dataset of just these."""
    torch.set_num_threads(1)
    loaders = {"raw": case.loader(batches), "raw_again": case.loader(batches)}
    for name, prepare in preparers(ranks, peers=peers).items():
        loaders[name] = prepare(case.loader(batches * ranks))
    for name, loader in loaders.items():
        assert exhaust(loader) == batches, name
    wall, busy = passes(loaders, rounds, batches + 1 if case.workers else -(-batches // TURNS))
    for loader in loaders.values():
        loader._iterator = None  # ends worker processes that were kept
    row: dict[str, Any] = {"raw_us": statistics.median(wall["raw"]) / batches * 1e6}
    row |= {name: ratio(wall, "raw", name) for name in loaders if name != "raw"}
    return row | {f"{name}_cpu": ratio(busy, "raw", name) for name in loaders if name != "raw"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes to measure with")
    options.set_defaults(rounds=40)
    args = options.parse_args()
    names = ["raw_again", "accel", *(("accelerate", "fabric") if args.peers else ())]
    columns = ["what", "ranks", "workers", "raw_us", "goal", *(name + end for name in names for end in ("", "_cpu"))]
    report = Report(
        "Batches per second, and per second of processor time, as a part of the raw DataLoader's (raw: µs a batch)",
        columns,
    )
    from accel_testing import RankPool

    rounds = 2 if args.quick else args.rounds
    for ranks in args.ranks:
        with RankPool(ranks, timeout=900) as pool:
            for case in CASES:
                batches = max(case.batches // 20, 10) if args.quick else case.batches
                rows = pool.run(measure, case, ranks, peers=args.peers, rounds=rounds, batches=batches)
                means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
                goal = 0.97 if ranks == 1 else 0.95
                report.add(what=case.name, ranks=ranks, workers=case.workers, goal=goal, **means)
    report.show(args.json)


if __name__ == "__main__":
    main()
