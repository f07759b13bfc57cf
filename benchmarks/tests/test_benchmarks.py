"""Every benchmark runs to its end and reports numbers, whose values are not checked."""

import importlib
import json
import math
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Options that leave the quickest part that still shows every column; columns that hold numbers in some row.
RUNS = {
    "axes": (["--cases", "cp:2", "ep:2"], {"raw_ms", "wall_ratio", "cpu_ratio", "+-"}),
    "checkpoint": (["--ranks", "1"], {"mib", "base_ms", "goal", "accel", "extra_memory"}),
    "collectives": ([], {"bare_us", "by_hand_to_bare", "accel_to_bare", "accel_to_by_hand"}),
    "deepspeed": (["--stages", "1"], {"raw_ms", "wall_percent", "cpu_percent"}),
    "dispatch": ([], {"work_us", "raw_adds_us", "goal", "accel"}),
    "fsdp": (["--cases", "clip"], {"raw_ms", "wall_ratio", "cpu_ratio", "+-", "raw_MiB", "memory_ratio"}),
    "import_and_cli": ([], {"seconds", "base_seconds", "added_ms"}),
    "load_state": (["--cases", "single"], {"mib", "base_ms", "goal", "accel", "fastest", "limit", "to_limit"}),
    "loader": (["--ranks", "2"], {"raw_us", "goal", "accel"}),
    "offload": ([], {"rows", "plain_ms", "read_ms", "cpu", "disk", "blocks_extra", "mapped", "new", "cpu_to_new"}),
    "padding": ([], {"padding", "saved", "work", "batches", "largest_to_mean"}),
    "planner": (["--ranks", "1", "--shapes", "mlp"], {"parameters_%", "gradients_%", "optimizer_%", "peak_%", "MB"}),
    "planner_xla": ([], {"parameters_%", "gradients_%", "optimizer_%", "peak_%", "MB"}),
    "resume": ([], {"raw_us", "accel_us", "accel_ratio"}),
    "step_overhead": (["--ranks", "1"], {"raw_us", "accel_adds_us", "accel_cpu_us", "accel_calls", "accel_ratio"}),
    "tracking": ([], {"step_us", "number_adds_us", "tensor_adds_us", "behind_us"}),
    "trainer": (["--case", "plain"], {"accelerate_us", "accel_us", "ratio", "cpu_ratio", "accel_calls"}),
}


def run(*arguments: str, timeout: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_is_listed_and_tested():
    assert run().removeprefix("benchmarks: ").strip().split(", ") == sorted([*RUNS, "gpu"])  # test_gpu.py runs it


ELSEWHERE = {"planner_xla": "torch_xla", "trainer": "accelerate"}  # in an environment of its own
# The quickest, which have all of the harness: ranks, loops, checkpoints, processes of their own. The planner's
# measurements are those of its own tests.
QUICK = ("checkpoint", "padding", "planner_xla", "resume")


@pytest.mark.ranks(1, group=False)
def test_every_benchmark_can_be_imported():
    for name in RUNS:
        if name not in ELSEWHERE:
            assert callable(importlib.import_module(f"benchmarks.{name}").main)


@pytest.mark.ranks(1, group=False)
def test_a_step_that_trains_otherwise_than_by_hand_is_no_figure():
    from benchmarks.axes import check_equal

    check_equal("cp:2", {"raw": lambda: 1.0, "accel": lambda: 1.000001})
    with pytest.raises(AssertionError, match="cp:2: losses of step 1 differ"):
        check_equal("cp:2", {"raw": lambda: 1.0, "accel": lambda: 1.001})


@pytest.mark.ranks(1, group=False)
def test_a_run_that_breaks_off_shows_what_it_measured():
    from benchmarks.harness import Report

    report, shown = Report("title", ["case", "raw_ms"]), StringIO()
    with redirect_stderr(shown):
        report.add(case="ep:2", raw_ms=250.64)
    assert shown.getvalue() == "case=ep:2 raw_ms=250.6\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS])
def test_a_quick_run_reports_finite_numbers(name, tmp_path):
    if name in ELSEWHERE:
        pytest.importorskip(ELSEWHERE[name])
    options, columns = RUNS[name]
    check(tmp_path, columns, name, "--quick", *options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, (options, _) in RUNS.items() if options])
def test_a_quick_run_of_all_cases_reports_finite_numbers(name, tmp_path):
    if name in ELSEWHERE:
        pytest.importorskip(ELSEWHERE[name])
    check(tmp_path, RUNS[name][1], name, "--quick", timeout=840)


def check(folder: Path, columns: set[str], *arguments: str, timeout: float = 120) -> None:
    file = folder / "rows.json"
    run(*arguments, "--json", str(file), timeout=timeout)
    rows = json.loads(file.read_text())["rows"]
    numbers = [(key, value) for row in rows for key, value in row.items() if isinstance(value, float | int)]
    assert {key for key, _ in numbers} >= columns
    assert [(key, value) for key, value in numbers if not math.isfinite(value)] == []
