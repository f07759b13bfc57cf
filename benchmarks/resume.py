"""The first batch after resuming far inside an epoch, against a raw DataLoader whose sampler starts there.

Both loaders exist already and the raw one knows its whole order: what is measured is the way from the position to the
batch, and nothing else to blur it. They take turns of some milliseconds; ``accel_cpu`` is the ratio of processor times.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from benchmarks.harness import Report, Rounds, extra_memory, interleave, parser, ratio
from benchmarks.loaders import Images, Rows, accel, accelerate, fabric, nth

BATCH = 32
FAR = 10**9
COLUMNS = ["what", "at_batch", "raw_us", "accel_us", "accel_ratio", "accel_cpu", "goal", "extra_mb"]


@dataclass(frozen=True)
class Run:
    """How to measure."""

    peers: bool
    rounds: int
    repeat: int


class StartAt(Sampler[int]):
    """What a careful person writes by hand for one run: positions from ``start`` on, of an order drawn beforehand."""

    def __init__(self, table: torch.Tensor | range, start: int) -> None:
        self.table, self.start = table, start

    def __iter__(self) -> Iterator[int]:
        table = self.table
        if isinstance(table, range):
            return iter(table[self.start :])
        parts = (table[begin : begin + 1024] for begin in range(self.start, len(table), 1024))
        return (index for part in parts for index in part.tolist())

    def __len__(self) -> int:
        return len(self.table) - self.start


class Stream(IterableDataset[Any]):
    """The same rows one after the other from ``start`` on; no reader can jump into it."""

    def __init__(self, size: int, start: int = 0) -> None:
        self.rows, self.start = Rows(size), start

    def __iter__(self) -> Iterator[Any]:
        return map(self.rows.__getitem__, range(self.start, len(self.rows)))


class SeekableStream(Stream):
    """The same, with a position that can be saved and continued from."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, len(self.rows)):
            self.start = number + 1
            yield self.rows[number]
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


def first(loader: Any) -> Any:
    """The first batch; leaving the iterator behind is part of the price."""
    return next(iter(loader))


def timed(run: Run, variants: dict[str, Callable[[], object]], *, slow: set[str]) -> dict[str, Any]:
    """The cells of one row. What is ``slow``, because it reads or walks its way, runs just once."""
    fast = [name for name in variants if name not in slow]
    busy: Rounds = {name: [] for name in fast}

    def repeated(name: str) -> Callable[[], None]:
        def many() -> None:
            started = time.process_time()
            for _ in range(run.repeat):
                variants[name]()
            busy[name].append(time.process_time() - started)

        return many

    times = interleave({name: repeated(name) for name in fast}, run.rounds)
    busy = {name: seconds[-run.rounds :] for name, seconds in busy.items()}  # without those to warm up
    row: dict[str, Any] = {f"{name}_us": statistics.median(times[name]) / run.repeat * 1e6 for name in fast}
    row |= {f"{name}_ratio": ratio(times, name, "raw") for name in fast if name != "raw"}
    row |= {f"{name}_cpu": ratio(busy, name, "raw") for name in fast if name != "raw"}
    if slow:
        times = interleave({name: variants[name] for name in sorted(slow)}, 1, warmup=0)
        medians = {name: statistics.median(times[name]) * 1e6 for name in slow}
        row |= {f"{name}_us": median for name, median in medians.items()}
        row |= {f"{name}_ratio": median / row["raw_us"] for name, median in medians.items()}
    return row


def skippers(dataset: Any, *, shuffle: bool = False, workers: int = 0) -> dict[str, Callable[[int], object]]:
    """How one comes to batch ``at``: with Accelerate by its ``skip_first_batches``, with Fabric by reading."""
    from accelerate import skip_first_batches

    def loader() -> "DataLoader[Any]":
        return DataLoader(dataset, batch_size=BATCH, shuffle=shuffle, num_workers=workers)

    theirs, others = accelerate(1)(loader()), fabric(1)(loader())
    return {"accelerate": lambda at: first(skip_first_batches(theirs, at)), "fabric": lambda at: nth(others, at)}


def map_style(
    run: Run, at: int, size: int, *, kind: type[Dataset[Any]] = Rows, shuffle: bool = False, workers: int = 0
) -> dict[str, Any]:
    """Resuming by ``load_state_dict``."""
    torch.set_num_threads(1)
    dataset = kind(size)  # type: ignore[call-arg]
    by_hand = StartAt(torch.randperm(size) if shuffle else range(size), at * BATCH)
    raw = DataLoader(dataset, batch_size=BATCH, sampler=by_hand, num_workers=workers)
    ours = accel(1)(DataLoader(dataset, batch_size=BATCH, shuffle=shuffle, num_workers=workers))
    ours.skip(at)
    state = ours.state_dict()

    def resume() -> Any:
        ours.load_state_dict(state)
        return first(ours)

    if not shuffle:
        assert torch.equal(resume()[1], first(raw)[1])
    variants: dict[str, Callable[[], object]] = {"raw": lambda: first(raw), "accel": resume}
    if run.peers:
        peers = skippers(dataset, shuffle=shuffle, workers=workers)
        variants |= {name: partial(go, at) for name, go in peers.items() if kind is Rows or name != "fabric"}
    if workers:  # processor time is this process's: what starting workers takes is in the time on the clock
        run = replace(run, repeat=max(run.repeat // 10, 1))
    return timed(run, variants, slow=set(variants) - {"raw", "accel"})


def skipping(run: Run, at: int, size: int) -> dict[str, Any]:
    """``skip_first_batches`` of accel, which makes a loader beside the one there is."""
    from accel import skip_first_batches

    torch.set_num_threads(1)
    dataset = Rows(size)
    raw = DataLoader(dataset, batch_size=BATCH, sampler=StartAt(range(size), at * BATCH))
    ours = accel(1)(DataLoader(dataset, batch_size=BATCH))
    variants = {"raw": lambda: first(raw), "accel": lambda: first(skip_first_batches(ours, at))}
    return timed(run, variants, slow=set())


def stream(run: Run, at: int, size: int, *, seeks: bool) -> dict[str, Any]:
    """Resuming an iterable dataset; the position is one that was come to by reading."""
    torch.set_num_threads(1)
    raw = DataLoader(Stream(size, at * BATCH), batch_size=BATCH)
    ours = accel(1)(DataLoader((SeekableStream if seeks else Stream)(size), batch_size=BATCH))
    reading = iter(ours)
    for _ in range(at):
        next(reading)
    state = ours.state_dict()
    reading.close()

    def resume() -> Any:
        ours.load_state_dict(state)
        return first(ours)

    assert torch.equal(resume()[1], first(raw)[1])
    variants: dict[str, Callable[[], object]] = {"raw": lambda: first(raw), "accel": resume}
    if run.peers:
        variants |= {name: partial(go, at) for name, go in skippers(Stream(size)).items()}
    return timed(run, variants, slow=set(variants) - ({"raw", "accel"} if seeks else {"raw"}))


def far(sample: int) -> dict[str, Any]:
    """Seeking in a shuffled dataset too large for anything that draws or walks its order; once, and cold."""
    torch.set_num_threads(1)
    prepare = accel(1)
    ours = prepare(DataLoader(Rows(2 * sample), batch_size=BATCH, shuffle=True))
    first(prepare(DataLoader(Rows(1000), batch_size=BATCH, shuffle=True)))  # imports
    seconds: list[float] = []

    def seek() -> None:
        started = time.perf_counter()
        ours.load_state_dict({**ours.state_dict(), "samples": sample})
        first(ours)
        seconds.append(time.perf_counter() - started)

    extra = extra_memory(seek)
    return {"accel_us": seconds[0] * 1e6, "extra_mb": None if extra is None else extra / 2**20}


KINDS: dict[str, tuple[Callable[..., dict[str, Any]], float | None]] = {
    "rows in order": (map_style, 1.5),
    "rows shuffled": (partial(map_style, shuffle=True), 1.5),
    "images shuffled": (partial(map_style, kind=Images, shuffle=True), 1.5),
    "images shuffled, 2 workers": (partial(map_style, kind=Images, shuffle=True, workers=2), 1.5),
    "skip_first_batches": (skipping, 1.5),
    "stream that can seek": (partial(stream, seeks=True), None),
    "stream that cannot": (partial(stream, seeks=False), None),
}


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=60)
    args = options.parse_args()
    places = (10, 1_000) if args.quick else (10, 1_000, 10_000, 100_000)
    run = Run(args.peers, 2 if args.quick else args.rounds, 2 if args.quick else 20)
    size = (places[-1] + 200) * BATCH
    peers = ["accelerate_ratio", "fabric_ratio"] if args.peers else []
    report = Report("First batch after resuming, as a ratio to a sampler or stream that starts there", COLUMNS + peers)
    from accel_testing import RankPool

    with RankPool(1, timeout=900) as pool:
        for what, (measure, goal) in KINDS.items():
            for at in places:
                report.add(what=what, at_batch=at, goal=goal, **pool.run(measure, run, at, size)[0])
        for sample in (FAR // 1000, FAR):
            row = pool.run(far, sample)[0]
            report.add(what=f"shuffled, sample {sample:.0e}", at_batch=sample // BATCH, **row)
    report.show(args.json)


if __name__ == "__main__":
    main()
