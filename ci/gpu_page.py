"""Writes the tables of ``docs/guides/gpu.md`` from the newest results in ``benchmarks/results``.

    python ci/gpu_page.py --update                   # after a change of the sections or goals
    python ci/gpu_page.py --keep DIR/results.json    # keeps the results of a run, and updates the page

Without results every cell of the GPU says "not run". Results of small sizes count until there are others: they prove
what does not depend on the size, and measure nothing.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.goals import GOALS  # noqa: E402
from benchmarks.gpu.sections import BY_NAME as SECTIONS  # noqa: E402
from benchmarks.gpu.table import number  # noqa: E402
from ci.page_tables import GeneratedTables, options_of  # noqa: E402

PAGE = GeneratedTables(ROOT / "docs" / "guides" / "gpu.md", "python ci/gpu_page.py")
RESULTS = ROOT / "benchmarks" / "results"
NOT_RUN = "not run"
# What is promised, how it is tested on CPUs, and the sections that prove it on a GPU.
PROOFS = (
    ("training equals a loop by hand: one device, FSDP2, accumulation, dropout on resumption", "tests", "tests"),
    ("DDP, FSDP2, collectives, dispatch on two ranks", "tests over gloo", "ranks"),
    ("no hidden wait for the device in a step", "tests that intercept the calls which wait", "syncs"),
    ("overhead of a step", "ratios in `benchmarks`", "steps"),
    ("batches are copied under the step and arrive unchanged", "values only", "transfer"),
    ("asynchronous saves hold the values of the call", "tests", "async_save"),
    ("speed of saves and loads", "ratios in `benchmarks`", "sync_save"),
    ("peak of memory that the planner predicts", "`benchmarks planner`", "planner"),
    ("compiled models train as in eager", "tests, without CUDA graphs", "compilation"),
    ("fp8 with torchao", "emulated, and by the CPU's fp8 products", "fp8"),
    ("offload to the host; search for a micro-batch", "tests, without a real shortage", "offload"),
    ("offloaded weights: outputs of the plain model", "tests, `benchmarks offload`", "inference"),
    ("loss scale equals torch's", "tests", "scaling"),
    ("profiler, counted communication, device facts", "tests", "profiling"),
)


def newest(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The results of a GPU with the latest date, those at full size before those of small sizes; None without any."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    of_gpus = [one for one in found if one["device"] == "cuda"]
    return max(of_gpus, key=lambda one: (not one["tiny"], one["date"])) if of_gpus else None


def tables(results: Mapping[str, Any] | None) -> str:
    """Both tables, and the versions that they were measured with."""
    head = "No results of a GPU are in the repository yet."
    if results is not None:
        machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
        head = f"Measured on {results['date']} with {machine}."
        if results["tiny"]:
            head = f"Run with small sizes on {results['date']} with {machine}. No run at full size is kept yet."
    promises = ["| promise | on CPUs | on a GPU | section |", "| --- | --- | --- | --- |"]
    promises += [f"| {text} | {cpu} | {state_of(results, section)} | `{section}` |" for text, cpu, section in PROOFS]
    goals = ["| measured on a GPU | goal | result | verdict |", "| --- | --- | --- | --- |"]
    for goal in GOALS:
        missing = results is None or results["tiny"]
        facts = {} if missing else results["goals"].get(goal.name, {})
        verdict = NOT_RUN if missing else facts.get("verdict", "not measured")
        goals.append(f"| {goal.text} | {goal.limit} | {number(facts.get('value')) or NOT_RUN} | {verdict} |")
    return "\n\n".join([head, "\n".join(promises), "\n".join(goals)])


def state_of(results: Mapping[str, Any] | None, section: str) -> str:
    """The status of a section in the results, as a cell."""
    assert section in SECTIONS, section
    facts = {} if results is None else results["sections"].get(section, {})
    status = str(facts.get("status", NOT_RUN)).replace("|", "/").splitlines()[0][:160]
    return f"{status}, small sizes" if status == "ok" and results is not None and results["tiny"] else status


def keep(file: Path, folder: Path = RESULTS) -> Path:
    """Copies the results of a run on a GPU into the repository, by date and device.

    Raises:
        SystemExit: the results are those of a CPU.
    """
    results = json.loads(file.read_text(encoding="utf-8"))
    if results["device"] != "cuda":
        sys.exit(f"{file} is of a run on the CPU; expected one on a GPU")
    name = results["machine"].get("gpu", "gpu").lower().replace(" ", "-") + ("-small" if results["tiny"] else "")
    target = folder / f"{results['date']}-{name}.json"
    folder.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return target


def main() -> int:
    args = options_of(__doc__, "FILE").parse_args()
    if args.keep:
        print(keep(args.keep))
    return PAGE.settle(tables(newest()), write=args.update or args.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
