"""The install page shows on which versions of torch and Python the sample of tests was run."""

import json
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from ci import versions
from ci.versions import PAGE, ROOT, RUNS, counts, keep, table

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><skipped/></testcase>
<testcase classname="a" name="three"/><testcase classname="a" name="three"><error/></testcase>
<testcase classname="b" name="one"><failure/></testcase>
<testcase classname="b" name="two"/>
</testsuite></testsuites>"""
RUN = {"date": "2026-11-28", "sample": 6, "passed": 4, "skipped": 0, "failed": 0, "note": ""}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report of five tests: one failed, and one had an error after it had passed."""
    (tmp_path / "report.xml").write_text(REPORT)
    return tmp_path / "report.xml"


def test_the_page_has_the_runs_that_were_kept() -> None:
    assert PAGE.settle(table(json.loads(RUNS.read_text(encoding="utf-8"))), write=False) == 0


def test_every_torch_that_the_workflow_names_was_run_here_and_no_python_that_it_leaves_out() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    assert {run["python"].rpartition(".")[0] for run in runs} <= {*matrix["python"]}
    named = {text.removesuffix(".*") for text in matrix["torch"] if text != "*"}
    assert named <= {run["torch"].rpartition(".")[0] for run in runs}


def test_a_test_counts_once_with_its_worst_outcome(report: Path) -> None:
    assert counts(report) == {"passed": 2, "skipped": 1, "failed": 2}


def test_a_report_without_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text("<testsuites/>")
    with pytest.raises(SystemExit, match="holds no test"):
        counts(tmp_path / "report.xml")


def test_a_run_replaces_the_one_of_the_same_versions(report: Path, tmp_path: Path) -> None:
    mine = {"python": platform.python_version(), "torch": version("torch").partition("+")[0]}
    other = {"python": "3.11.7", "torch": "2.9.0", **RUN}
    (tmp_path / "runs.json").write_text(json.dumps([{**mine, **RUN}, other]))
    keep(report, 20, runs=tmp_path / "runs.json", day=date(2026, 12, 1), note="two of them")
    kept = json.loads((tmp_path / "runs.json").read_text())
    assert other in kept
    expected = {**mine, "date": "2026-12-01", "sample": 20, "passed": 2, "skipped": 1, "failed": 2}
    assert [run for run in kept if run != other] == [{**expected, "note": "two of them"}]


def test_rows_are_in_the_order_of_versions_and_leave_out_what_did_not_happen() -> None:
    rows = table(
        [
            {"python": "3.13.0", "torch": "2.9.0", **RUN},
            {"python": "3.9.0", "torch": "2.15.0", **RUN},
            {"python": "3.9.0", "torch": "2.9.0", **RUN, "failed": 1, "note": "why"},
        ]
    )
    assert rows.splitlines()[2:] == [
        "| 3.9.0 | 2.9.0 | 2026-11-28 | 6 | 4 passed, 1 failed (why) |",
        "| 3.9.0 | 2.15.0 | 2026-11-28 | 6 | 4 passed |",
        "| 3.13.0 | 2.9.0 | 2026-11-28 | 6 | 4 passed |",
    ]


@pytest.mark.parametrize("words", [["--sample", "6"], ["--keep", "report.xml"], ["--note", "why"]])
def test_an_option_without_what_it_is_about_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py", *words])
    with pytest.raises(SystemExit) as caught:
        versions.main()
    assert caught.value.code == 2
