"""Layouts on the device against one process, and tests with the marker ``gpu`` or their bodies on the CPU."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from accel_testing import Program
from accel_testing.equivalence.equivalence import run_check
from benchmarks.gpu.bench import Bench

ROOT = Path(__file__).parents[3]
SHARED = "packages/accel/tests/test_one_gpu.py"
# What a context on a device leaves in a process (threads, mappings) is no leak of a test.
OPTIONS = ("-p", "no:cacheprovider", "-o", "accel_leaks=environment groups", "--tb=short")
FOLDERS = ("packages", "testing", "docs")


def files(marker: str) -> list[str]:
    """The test files that have the marker: those of other tests import libraries that a GPU machine may lack."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    named = re.compile(rf"pytest\.mark\.{marker}\b")
    return [str(path.relative_to(ROOT)) for path in found if named.search(path.read_text(encoding="utf-8"))]


LAYOUTS = ("single/fp64", "single/bf16/acc=3/weighted", "single/fp16", "fsdp/fp32", "fsdp/fp64/acc=3/short")
OFFLOADED = ("fsdp/fp32/cpu_offload=true",)


def run(bench: Bench) -> None:
    bench.attempt("equivalence", lambda: equivalence(bench))
    if not bench.on_cuda:
        bench.attempt("pytest", lambda: tested(bench, "pytest", ["-k", "cpu", SHARED]))
        return
    pages = [file for file in files("gpu") if file.startswith("docs/")]  # many and slow: last, with what time is left
    for label, chosen in (("pytest", sorted({*files("gpu")} - {*pages})), ("pages", pages)):
        bench.attempt(label, partial(tested, bench, label, [*workers(), "-m", "gpu", "--require=gpu", *chosen]))


def workers() -> list[str]:
    """Options of pytest-xdist where it is installed: most of a test's time is its process's start."""
    return [] if find_spec("xdist") is None else ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal"]


def program() -> Program:
    """A classifier with normalisation, on twelve global batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    batches = [torch.randn(24, 8) for _ in range(12)]
    return Program(model, lambda model, batch: (model(batch) - batch[:, :4]).square().mean(), batches)


def equivalence(bench: Bench) -> None:
    """Distance of each layout's training from that of one process on the CPU, over what is allowed."""
    report = run_check(
        f"{__file__}:program", ",".join(bench.pick(LAYOUTS + OFFLOADED, LAYOUTS[1:2])), cpu=not bench.on_cuda
    )
    for result in report.results:
        bench.row(str(result.layout), "distance over the allowed one", result.distance / result.tolerance, "x")
    if not report.ok:
        raise AssertionError(str(report))


def tested(bench: Bench, label: str, chosen: Sequence[str]) -> None:
    """Runs pytest until shortly before the deadline; each failure is a row with its error's last line."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", f"--basetemp={folder}", *OPTIONS, *chosen]
        output, code = run_until(command, max(bench.left, 1))
    (bench.file.parent / f"{bench.section}-{label}.txt").write_text(output, encoding="utf-8")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last(output))}
    for word, number in counts.items():
        bench.row(label, word, number)
    if code is None:
        raise TimeoutError(f"the tests did not end in time; so far: {last(output)}")
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE)
    if failed or code != 0:
        raise AssertionError("; ".join(failed)[:1500] or f"pytest ended with {code}: {last(output)}")


def run_until(command: Sequence[str], seconds: float) -> tuple[str, int | None]:
    """Output and exit code of a run of pytest; no code if it was interrupted after ``seconds``."""
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return running.communicate(timeout=seconds)[0], running.returncode
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)  # pytest ends its ranks and says what it has found so far
    try:
        return running.communicate(timeout=10)[0], None
    except subprocess.TimeoutExpired:
        running.kill()
        return running.communicate()[0], None


def last(output: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
