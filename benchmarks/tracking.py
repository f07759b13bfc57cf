"""Microseconds that logging a scalar adds to a training step, on the main rank and on the others.

``call_us`` is what a call takes by itself, of this thread's processor time; on a busy machine the steadier figure.
``behind_us`` is what the trackers' own threads spend on each value, while the loop computes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Report, added, interleave, parser


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """One rank's row: what a step takes without logging, and what logging a number or a loss adds."""
    from accel import Accelerator

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=folder)
        accelerator.init_trackers("benchmark")
        model = accelerator.prepare(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        )
        batch = torch.randn(32, 64)
        count = 0

        def loop(log: Callable[[Any, int], None] | None) -> Callable[[], None]:
            def run() -> None:
                nonlocal count
                for _ in range(steps):
                    count += 1
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    if log is not None:
                        log(loss, count)

            return run

        variants = {
            "none": loop(None),
            "number": loop(lambda _, step: accelerator.log({"loss": 0.5}, step=step)),
            "tensor": loop(lambda loss, step: accelerator.log({"loss": loss}, step=step)),
        }
        # This thread's own processor time: what other threads and processes do in the meantime is not the loop's.
        times = interleave(variants, rounds, warmup=2, clock=time.thread_time)
        row = {f"{name}_adds_us": added(times, name, "none", per=steps) for name in ("number", "tensor")}
        started, own = time.process_time(), time.thread_time()
        for step in range(10 * steps):
            accelerator.log({"loss": 0.5}, step=step)
        call = time.thread_time() - own
        accelerator.end_training()
        behind = (time.process_time() - started) - (time.thread_time() - own)
    row["step_us"] = statistics.median(times["none"]) / steps * 1e6
    return {**row, "call_us": call / (10 * steps) * 1e6, "behind_us": behind / (10 * steps) * 1e6}


def main() -> None:
    options = parser(__doc__)
    args = options.parse_args()
    rounds, steps = (2, 20) if args.quick else (args.rounds, 200)
    report = Report(
        "What logging adds to a step (goal: 10 µs on the main rank, 0 on others)",
        ["rank", "step_us", "number_adds_us", "tensor_adds_us", "call_us", "behind_us"],
    )
    from accel_testing import RankPool

    report.add(rank="alone", **measure(rounds, steps))
    with RankPool(2, timeout=900) as pool:
        for rank, row in enumerate(pool.run(measure, rounds, steps)):
            report.add(rank=f"{rank} of 2", **row)
    report.show(args.json)


if __name__ == "__main__":
    main()
