"""Microseconds that a training step costs more than the same step written by hand in PyTorch.

``adds us`` is what the clock on the wall says. On several ranks a step mostly waits for the others, and that wait
varies by more than what is sought; ``cpu us`` is the processor time of the thread that runs the loop, which waiting
is no part of, measured in pairs of short blocks. ``calls`` are the Python and C calls that a step makes more than the
one by hand: the same number on any machine, however busy.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.harness import Report, added, calls, interleave, paired, parser
from benchmarks.loops import CASES, Case, Step, variants


def measure(case: Case, ranks: int, *, peers: bool, rounds: int, steps: int) -> dict[str, Any]:
    """One row: the raw step's time and what each other way adds to it, as one rank sees it."""
    torch.set_num_threads(1)
    loops = {name: make(case, ranks) for name, make in variants(peers)}

    def run(step: Any) -> Any:
        def many() -> None:
            for _ in range(steps):
                step()

        return many

    ways = {name: run(step) for name, step in loops.items()}
    times = interleave(ways, rounds, warmup=2)
    row: dict[str, Any] = {"case": case.name, "ranks": ranks}
    row["raw_us"] = statistics.median(times["raw"]) / steps * 1e6
    for name in loops:
        if name != "raw":
            row[f"{name}_adds_us"] = added(times, name, "raw", per=steps)
            row[f"{name}_cpu_us"] = processor_time(ways[name], ways["raw"], rounds) / steps * 1e6
            row[f"{name}_calls"] = (calls(ways[name]) - calls(ways["raw"])) / steps
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(times[name], times["raw"], strict=True))
    return row


def processor_time(way: Step, base: Step, rounds: int) -> float:
    """Seconds of this thread that ``way`` takes more than ``base``: the median of many pairs, whose order turns."""
    (blocks,) = paired(way, base, 4 * rounds, clocks=[time.thread_time])
    return statistics.median(a - b for a, b in zip(blocks.first, blocks.second, strict=True))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes to measure with")
    options.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="which steps to measure")
    args = options.parse_args()
    chosen = tuple(case for case in CASES if case.name in args.cases)
    rounds, steps = (2, 10) if args.quick else (args.rounds, 400)
    names = [name for name, _ in variants(args.peers) if name != "raw"]
    columns = [
        "case",
        "ranks",
        "raw_us",
        *(f"{name}_{what}" for name in names for what in ("adds_us", "cpu_us", "calls", "ratio")),
    ]
    report = Report("What a step costs beyond raw PyTorch (goal: 15 µs plain, 20 µs with one of the others)", columns)
    from accel_testing import RankPool

    for ranks in args.ranks:
        # Accelerate keeps its settings for the life of a process, so that each case needs processes of its own then.
        for cases in [(case,) for case in chosen] if args.peers else [chosen]:
            with RankPool(ranks, timeout=900) as pool:
                for case in cases:
                    report.add(**pool.run(measure, case, ranks, peers=args.peers, rounds=rounds, steps=steps)[0])
    report.show(args.json)


if __name__ == "__main__":
    main()
