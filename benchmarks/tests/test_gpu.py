"""The driver of the measurements on a GPU: sections end by themselves or are ended, and their rows meet the goals."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.driver import RunPlan, lines_of, run_section, status_of
from benchmarks.gpu.goals import GOALS, judged
from benchmarks.gpu.sections import BY_NAME, SECTIONS, Section
from benchmarks.gpu.sections.tests import files
from benchmarks.gpu.table import report

ROOT = Path(__file__).parents[2]


def row(goal: str, value: float, case: str = "one") -> dict[str, object]:
    return {"kind": "row", "section": "steps", "case": case, "metric": "m", "value": value, "unit": "x", "goal": goal}


@pytest.mark.parametrize(
    ("values", "verdict", "worst"),
    [([1.0, 1.004], "reached", 1.004), ([1.0, 1.2, 1.1], "missed", 1.2), ([], "not measured", None)],
)
def test_the_worst_row_decides_about_a_goal(values, verdict, worst):
    found = judged([row("step_ratio", value) for value in values])["step_ratio"]
    assert (found["verdict"], found["value"]) == (verdict, worst)


def test_a_goal_that_is_a_minimum_is_missed_by_less():
    found = judged([row("fp8_speed", 0.99), row("fp8_speed", 0.9, "slow")])["fp8_speed"]
    assert (found["verdict"], found["value"], found["case"]) == ("missed", 0.9, "slow")


def test_a_value_that_is_no_number_is_missed():
    assert judged([row("step_ratio", float("nan"))])["step_ratio"]["verdict"] == "missed"


def test_sections_together_take_ten_minutes_at_most():
    assert sum(section.seconds for section in SECTIONS) <= 600
    assert {path.stem for path in (ROOT / "benchmarks/gpu/sections").glob("*.py")} == {*BY_NAME, "__init__"}


def test_a_few_sections_share_all_the_time(tmp_path):
    chosen = [BY_NAME["steps"], BY_NAME["fp8"]]
    some, every = (RunPlan(sections, tmp_path, "cuda", False, 600) for sections in (chosen, SECTIONS))
    assert [some.limit(section) for section in chosen] == [600 * 95 / 170, 600 * 75 / 170]
    assert [every.limit(section) for section in chosen] == [95, 75]


@pytest.mark.parametrize(
    ("lines", "code", "status"),
    [
        ([row("step_ratio", 1.0), {"kind": "end"}], 0, "ok"),
        ([{"kind": "needs cuda", "case": "a", "why": "graphs"}, {"kind": "end"}], 0, "needs cuda: graphs"),
        (
            [{"kind": "failed", "case": "a", "error": "E: b"}, {"kind": "end"}],
            0,
            "failed: 1 of its cases, first a: E: b",
        ),
        ([row("step_ratio", 1.0)], None, "late: killed after 5 s; 1 rows"),
        ([row("step_ratio", 1.0)], -11, "failed: exit status -11: the last words"),
        ([row("step_ratio", 1.0), {"kind": "dropped", "case": "b"}, {"kind": "end"}], 0, "late: 1 cases dropped"),
        ([{"kind": "end"}], 0, "failed: it measured nothing"),
    ],
)
def test_a_section_has_one_status(lines, code, status, tmp_path):
    (tmp_path / "steps.log").write_text("x\nthe last words\n")
    assert status_of(lines, code, 5, tmp_path, "steps") == status


def test_a_section_that_hangs_is_ended_and_keeps_its_rows(tmp_path, monkeypatch):
    hanging = "import os, time, json\nopen('s.jsonl', 'a').write(json.dumps({'kind': 'row'}) + '\\n{\"kin')\n"
    hanging += "open('s.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    plan = RunPlan(SECTIONS, tmp_path, "cpu", True, 60)
    started = subprocess.Popen

    def instead(command, cwd, **options):
        return started([sys.executable, "-c", hanging], cwd=tmp_path, **options)

    monkeypatch.setattr(subprocess, "Popen", instead)
    began = time.monotonic()
    assert run_section(plan, Section("s", 1, ""), 4, set()) is None
    assert time.monotonic() - began < 60
    assert lines_of(tmp_path / "s.jsonl") == [{"kind": "row"}]
    assert not Path("/proc", (tmp_path / "s.pid").read_text()).exists()


def tiny(folder: Path, *sections: str, timeout: float) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--out", str(folder), "--tiny"]
    done = subprocess.run(
        [*command, *(["--only", *sections] if sections else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "table.md").read_text() == report(results)
    assert [goal.name for goal in GOALS] == list(results["goals"])
    return results


def test_chosen_sections_run_with_tiny_sizes(tmp_path):
    results = tiny(tmp_path, "machine", "syncs", "ranks", timeout=280)
    states = {name: facts["status"] for name, facts in results["sections"].items()}
    assert states.pop("ranks").startswith("needs cuda: ")
    assert states == {"machine": "ok", "syncs": "ok"}
    assert results["machine"]["torch"]
    assert {facts["verdict"] for facts in results["goals"].values()} == {"not measured"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs_with_tiny_sizes(tmp_path):
    results = tiny(tmp_path, timeout=840)
    assert [name for name in results["sections"]] == [section.name for section in SECTIONS]


def test_a_gpu_is_asked_for_where_there_is_none(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--tiny" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_pages_are_tested_on_a_gpu_after_everything_else(tmp_path, monkeypatch):
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.sections import tests

    asked = {}
    monkeypatch.setattr(Bench, "on_cuda", True)
    monkeypatch.setattr(Bench, "clear", lambda self: None)
    monkeypatch.setattr(tests, "tested", lambda bench, label, chosen: asked.update({label: chosen}))
    tests.run(Bench("tests", tmp_path / "rows", None, False, time.monotonic() + 60, tmp_path))
    assert list(asked) == ["pytest", "pages"]
    options = [*tests.workers(), "-m", "gpu", "--require=gpu"]
    assert asked["pages"] == [*options, "docs/tests/test_pages.py"]
    assert "packages/accel/tests/test_one_gpu.py" in asked["pytest"]
    chosen = [file for label in asked for file in asked[label][len(options) :]]
    assert sorted(chosen) == sorted(files("gpu"))


def test_files_with_a_marker_are_found():
    assert "packages/accel/tests/test_one_gpu.py" in files("gpu")
    assert files("gpu_ranks") == ["packages/accel/tests/test_two_ranks_on_one_gpu.py"]
