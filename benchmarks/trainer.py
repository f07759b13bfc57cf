"""A step of Transformers' Trainer on accel, beside the same on the installed Accelerate.

Both are programs of their own, because a process has one ``accelerate``; they take turns round by round. A step is the
time between two steps of the optimizer, and its processor time, as medians of a round. ``ratio`` is accel's time over
Accelerate's in the same round, the median of all rounds. ``calls`` are those of Python functions and of C functions by
Python in a step, which no other program disturbs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from benchmarks import harness

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "accumulate 4": {"gradient_accumulation_steps": 4},
    "logging": {"logging_steps": 1},
}
SKIPPED, COUNTED = 5, 10
"""Steps of a round that warm up, and steps at its end whose calls are counted and whose time is not."""


@dataclass
class Program:
    """A process that trains on ``library`` whenever it is asked to."""

    library: str
    _process: subprocess.Popen[str] = field(init=False, repr=False)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.trainer", "--serve", self.library]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def train(self, case: str, steps: int) -> dict[str, float]:
        """Trains, and returns the median seconds of a step, ``wall`` and ``cpu``, and its number of ``calls``.

        Raises:
            RuntimeError: the program has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([case, steps]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program on {self.library} ended; its error stands above")
        found: dict[str, float] = json.loads(line)
        return found


def serve(library: str) -> None:
    """Answers each request on standard input with the times of a training."""
    if library == "accel":
        import accel_compat

        accel_compat.install()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        case, steps = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(CASES[case], steps, folder)), file=answers, flush=True)


def measured(options: dict[str, Any], steps: int, folder: str) -> dict[str, float]:
    """Median seconds of a step of one training, and the calls of one step."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    moments: list[tuple[float, float]] = []
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    class Moments(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if len(moments) < SKIPPED + steps:
                moments.append((time.perf_counter(), time.process_time()))
            if len(moments) == SKIPPED + steps:
                sys.setprofile(note)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            sys.setprofile(None)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (256, 8))]
    common: dict[str, Any] = {
        "max_steps": SKIPPED + steps + COUNTED,
        "per_device_train_batch_size": 2,
        "logging_steps": 10**6,
    }
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    given = transformers.TrainingArguments(output_dir=folder, **{**common, **quiet, **options})
    transformers.Trainer(model=model, args=given, train_dataset=rows, callbacks=[Moments()]).train()
    kept = moments[SKIPPED - 1 :]
    medians = (statistics.median(after[one] - before[one] for before, after in pairwise(kept)) for one in (0, 1))
    return {**dict(zip(("wall", "cpu"), medians, strict=True)), "calls": count / COUNTED}


def main() -> None:
    """Prints the table.

    Raises:
        SystemExit: Accelerate is not installed.
    """
    options: argparse.ArgumentParser = harness.parser(__doc__)
    options.add_argument("--case", action="append", choices=list(CASES), help="a case; all of them otherwise")
    options.add_argument("--serve", choices=["accel", "accelerate"], help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    if find_spec("accelerate") is None:
        raise SystemExit("Accelerate is not installed here: hatch run peers:bench trainer")
    rounds, steps = (2, 10) if args.quick else (args.rounds, 200)
    columns = ["case", "accelerate_us", "accel_us", "ratio", "cpu_ratio", "accelerate_calls", "accel_calls"]
    report = harness.Report("A step of Trainer on accel, over the same on Accelerate (goal: 1.0)", columns)
    with Program("accelerate") as theirs, Program("accel") as ours:
        for case in args.case or CASES:
            found: dict[str, list[dict[str, float]]] = {"accelerate": [], "accel": []}
            for number in range(rounds):
                for program in (theirs, ours) if number % 2 else (ours, theirs):
                    found[program.library].append(program.train(case, steps))
            pairs = list(zip(found["accel"], found["accelerate"], strict=True))
            report.add(
                case=case,
                **{f"{name}_us": statistics.median(one["wall"] for one in rows) * 1e6 for name, rows in found.items()},
                **{f"{name}_calls": statistics.median(one["calls"] for one in rows) for name, rows in found.items()},
                ratio=statistics.median(a["wall"] / b["wall"] for a, b in pairs),
                cpu_ratio=statistics.median(a["cpu"] / b["cpu"] for a, b in pairs),
            )
    report.show(args.json)


if __name__ == "__main__":
    main()
