"""Keeps what the sample of tests gave beside each torch and Python, and writes the table of it on the install page.

    python -m pytest -m "not slow" --sample=6 --junitxml=report.xml packages testing
    python ci/versions.py --keep report.xml --sample 6    # with the Python and torch that ran the tests
    python ci/versions.py --update                        # writes the page; without an option it is only compared

``ci/versions.json`` has one entry for each pair of Python and torch: the last run that was kept.
"""

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ci.page_tables import GeneratedTables, options_of  # noqa: E402

PAGE = GeneratedTables(ROOT / "docs" / "get-started" / "install.md", "python ci/versions.py")
RUNS = ROOT / "ci" / "versions.json"
OUTCOMES = ("passed", "skipped", "failed")

Run = Mapping[str, Any]


def outcome(case: ElementTree.Element) -> str:
    """The outcome of one test of a report; an error outside the test itself is a failure."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def counts(report: Path) -> dict[str, int]:
    """Number of tests with each outcome in a report of pytest, in the order of ``OUTCOMES``.

    Raises:
        SystemExit: the report holds no test.
    """
    # A test that passes and fails in its teardown is there twice.
    worst: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, found = f"{case.get('classname')}::{case.get('name')}", outcome(case)
        worst[name] = max(worst.get(name, found), found, key=("skipped", "passed", "failed").index)
    if not worst:
        sys.exit(f"{report} holds no test; expected a report of: pytest --junitxml")
    found_counts = Counter(worst.values())
    return {name: found_counts[name] for name in OUTCOMES}


def ordered(runs: Iterable[Run]) -> list[Run]:
    """Runs by Python and torch, each as numbers."""
    return sorted(runs, key=lambda run: [[int(part) for part in run[name].split(".")] for name in ("python", "torch")])


def keep(report: Path, sample: int, *, runs: Path = RUNS, day: date | None = None, note: str = "") -> None:
    """Puts the counts of a report in place of the entry of this Python and torch."""
    entry = {
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "date": str(day or date.today()),
        "sample": sample,
        **counts(report),
        "note": note,
    }
    known = json.loads(runs.read_text(encoding="utf-8")) if runs.exists() else []
    others = [run for run in known if any(run[name] != entry[name] for name in ("python", "torch"))]
    runs.write_text(json.dumps(ordered([*others, entry]), indent=1) + "\n", encoding="utf-8")


def table(runs: Iterable[Run]) -> str:
    """The runs as a table: one row each."""
    rows = ["| Python | torch | date | tests of a package, at most | result |", "| --- | --- | --- | --- | --- |"]
    for run in ordered(runs):
        result = ", ".join(f"{run[name]} {name}" for name in OUTCOMES if run[name])
        note = f" ({run['note']})" if run["note"] else ""
        rows.append(f"| {run['python']} | {run['torch']} | {run['date']} | {run['sample']} | {result}{note} |")
    return "\n".join(rows)


def main() -> int:
    options = options_of(__doc__, "REPORT")
    options.add_argument("--sample", type=int, metavar="N", help="the value of --sample that the tests were run with")
    options.add_argument("--note", default="", help="what a reader has to know of the failures")
    given = options.parse_args()
    if (given.keep is None) != (given.sample is None):
        options.error("--keep needs --sample, and --sample needs --keep")
    if given.keep is None and given.note:
        options.error("--note is about a run; give --keep and --sample, too")
    if given.keep is not None:
        keep(given.keep, given.sample, note=given.note)
    tables = table(json.loads(RUNS.read_text(encoding="utf-8")))
    return PAGE.settle(tables, write=given.update or given.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
