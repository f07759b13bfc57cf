"""The page about GPUs shows the newest results that are kept."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.goals import judged
from benchmarks.gpu.sections import BY_NAME
from ci.gpu_page import PAGE, PROOFS, keep, newest, tables

ROW = {"kind": "row", "section": "steps", "case": "llama", "metric": "x", "value": 1.002, "unit": "x"}


def results(date: str, **other: object) -> dict[str, object]:
    found = {
        "date": date,
        "tiny": False,
        "device": "cuda",
        "machine": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
        "sections": {"steps": {"status": "ok", "seconds": 70}, "fp8": {"status": "failed: a|b", "seconds": 3}},
        "goals": judged([ROW | {"goal": "step_ratio"}]),
        "lines": [],
    }
    return found | other


def test_the_page_is_that_of_the_newest_results() -> None:
    assert PAGE.settle(tables(newest()), write=False) == 0


def test_every_section_that_measures_proves_something() -> None:
    assert {section for _, _, section in PROOFS} == {*BY_NAME} - {"machine"}


def test_without_results_nothing_is_proven_on_a_gpu() -> None:
    rows = [line for line in tables(None).splitlines() if line.startswith("|") and "---" not in line]
    assert all("not run" in line or "goal" in line or "promise" in line for line in rows)


def test_results_are_shown_with_date_and_versions() -> None:
    text = tables(results("2026-12-01"))
    assert "Measured on 2026-12-01 with gpu NVIDIA H200, torch 2.11.0." in text
    assert "| overhead of a step | ratios in `benchmarks` | ok | `steps` |" in text
    assert "| fp8 with torchao | emulated, and by the CPU's fp8 products | failed: a/b | `fp8` |" in text
    assert "| step of a 1.1B Llama over the same step in raw PyTorch | <= 1.005 | 1 | reached |" in text


def test_the_newest_full_run_on_a_gpu_counts(tmp_path: Path) -> None:
    for number, one in enumerate(
        [
            results("2026-12-01"),
            results("2026-12-03"),
            results("2026-12-04", tiny=True),
            results("2026-12-05", device="cpu"),
            results("2026-12-02"),
        ]
    ):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    found = newest(tmp_path)
    assert found is not None
    assert found["date"] == "2026-12-03"
    assert newest(tmp_path / "nowhere") is None


def test_small_sizes_prove_what_does_not_depend_on_them_and_measure_nothing(tmp_path: Path) -> None:
    for number, one in enumerate([results("2026-12-04", tiny=True), results("2026-12-03", tiny=True)]):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    text = tables(newest(tmp_path))
    assert text.startswith("Run with small sizes on 2026-12-04 with gpu NVIDIA H200")
    assert "| overhead of a step | ratios in `benchmarks` | ok, small sizes | `steps` |" in text
    assert "| step of a 1.1B Llama over the same step in raw PyTorch | <= 1.005 | not run | not run |" in text


def test_a_full_run_is_kept_under_its_date_and_device(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results("2026-12-01")))
    assert keep(tmp_path / "results.json", tmp_path / "kept").name == "2026-12-01-nvidia-h200.json"
    (tmp_path / "results.json").write_text(json.dumps(results("2026-12-01", tiny=True)))
    assert keep(tmp_path / "results.json", tmp_path / "kept").name == "2026-12-01-nvidia-h200-small.json"
    (tmp_path / "results.json").write_text(json.dumps(results("2026-12-01", device="cpu")))
    with pytest.raises(SystemExit, match="on the CPU"):
        keep(tmp_path / "results.json", tmp_path / "kept")
