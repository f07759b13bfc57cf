"""``accel test``: checks by trial what works on this machine."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import rich_click as click
import torch

from accel_testing.equivalence.program import Program

_LAYOUTS = ("single", "single/bf16", "ddp:2", "ddp:2/bf16", "ddp:2/acc=3", "fsdp:2", "fsdp:2/bf16", "fsdp1:2")
_OWN = {"single", "ddp", "fsdp", "fsdp1", "xla"}  # other backends are tried with their default options
_NOT_HERE = "not installed"
_JOB = "accel_testing.cli.selftest_job"


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: place, subject, whether it works, duration, and a remark.

    ``ok`` is None if the trial needs a library that is not installed.
    """

    where: str
    what: str
    ok: bool | None
    seconds: float
    remark: str


def program() -> Program:
    """A small training program: ten steps of a two-layer model on fixed data."""
    from accel_testing.equivalence.models import TinyMLP

    torch.manual_seed(0)
    model = TinyMLP()
    batches = [(torch.randn(12, 8), torch.randn(12, 4)) for _ in range(10)]
    return Program(model, lambda m, batch: torch.nn.functional.mse_loss(m(batch[0]), batch[1]), batches)


@click.command()
@click.option("--cpu", is_flag=True, help="Try the CPU only, whatever else there is.")
@click.option("--quick", is_flag=True, help="One process, and two over DDP.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def test(*, cpu: bool, quick: bool, as_json: bool) -> int:
    """Trains a small model on this machine's devices with every installed strategy, compares each with training in one
    process without accel, and prints what works. Also starts, saves and resumes jobs with accel launch.

    Ends with 1 if an installed feature does not work.
    """
    trials = []
    for trial in trials_of(cpu=cpu, quick=quick):
        trials.append(trial)
        if not as_json:
            verdict = {True: "works", False: "FAILS", None: "-    "}[trial.ok]
            print(f"{verdict}  {trial.where:<5} {trial.what:<28} {trial.seconds:6.1f} s  {trial.remark}", flush=True)
    if as_json:
        rows = [{name: getattr(trial, name) for name in Trial.__slots__} for trial in trials]
        print(json.dumps(rows, indent=2))
    failed = [trial for trial in trials if trial.ok is False]
    if not as_json:
        there = [trial for trial in trials if trial.ok is not None]
        print(f"{len(there) - len(failed)} of {len(there)} work" + ("; see above for the rest" if failed else ""))
    return 1 if failed else 0


def trials_of(*, cpu: bool, quick: bool) -> Iterator[Trial]:
    """Runs the trials one after another."""
    yield from _training("cpu", _layouts(quick=quick), quick=quick)
    found = torch.accelerator.device_count() if torch.accelerator.is_available() and not cpu else 0
    if found:
        kind = str(torch.accelerator.current_accelerator())
        fitting = [layout for layout in _layouts(quick=quick) if found > 1 or ":" not in layout]
        yield from _training(kind, fitting, quick=quick)
    yield from _jobs()


def _layouts(*, quick: bool) -> list[str]:
    if quick:
        return ["single", "ddp:2"]
    from accel_backends import installed_backends

    return [*_LAYOUTS, *(f"{name}:2" for name in installed_backends() if name not in _OWN)]


def _training(where: str, layouts: list[str], *, quick: bool) -> Iterator[Trial]:
    from accel_testing.equivalence.equivalence import run_check

    target = f"{Path(__file__)}:program"
    own = [layout for layout in layouts if layout in _LAYOUTS]
    # Another package's backend may not support float64; it trains in float32 instead.
    others = [layout for layout in layouts if layout not in own]
    tried = [(own, ("fp32",) if quick else ("fp64", "fp32")), (others, ("fp32",))]
    reports = (run_check(target, some, precisions=kinds, cpu=where == "cpu") for some, kinds in tried if some)
    for result in (result for report in reports for result in report.results):
        if result.error:
            remark = result.error.strip().splitlines()[-1]
        elif result.ok:
            away = f"{result.distance:.0e}" if math.isfinite(result.distance) else "far"
            remark = f"{away} from one process, {result.tolerance:.0e} allowed"
        else:
            remark = str(result.departure)
        ok = None if _NOT_HERE in result.error else result.ok
        yield Trial(where, f"training {result.layout}", ok, result.seconds, remark)


def _jobs() -> Iterator[Trial]:
    """Trials of launched jobs: two processes train and save, and a single process resumes."""
    with tempfile.TemporaryDirectory(prefix="accel_test_") as folder:
        for what, count, word in (("launch 2, train and save", 2, "save"), ("resume with 1", 1, "resume")):
            argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", str(count), "-m", _JOB, word]
            begin = time.monotonic()
            env = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
            try:
                done = subprocess.run(
                    [*argv, folder], env=env, capture_output=True, text=True, timeout=600, check=False
                )
                ok, said = done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr)
            except subprocess.TimeoutExpired:
                ok, said = False, "not done after 600 s"
            yield Trial("cpu", what, ok, time.monotonic() - begin, (said.strip().splitlines() or [""])[-1])
