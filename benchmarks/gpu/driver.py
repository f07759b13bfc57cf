"""Runs sections, each in a process group of its own with a time limit, and collects their lines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import judged
from benchmarks.gpu.sections import Section

ROOT = Path(__file__).parents[2]
_SHORTEST = 8.0


@dataclass(frozen=True)
class RunPlan:
    """What is run: the sections, the device, the seconds for all of it."""

    sections: Sequence[Section]
    out: Path
    device: str
    tiny: bool
    seconds: float

    @property
    def workers(self) -> int:
        """Sections that run at the same time: on a device, whose times they would spoil, one."""
        return 2 if self.device == "cpu" else 1

    def limit(self, section: Section) -> float:
        """Seconds of a section, before what is left of the whole is looked at; a few sections share all of it."""
        limits = {one.name: one.tiny_seconds if self.tiny else one.seconds for one in self.sections}
        return limits[section.name] * max(1.0, self.seconds / sum(limits.values()))


def run(plan: RunPlan) -> dict[str, Any]:
    """Runs the plan, and returns and writes the summary; ``results.json`` is complete after every section."""
    plan.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + plan.seconds
    states: dict[str, dict[str, Any]] = {}
    lines: list[dict[str, Any]] = []
    summary = summarised(plan, states, lines)
    running: set[subprocess.Popen[bytes]] = set()
    pool = ThreadPoolExecutor(plan.workers)
    try:
        finished = pool.map(lambda section: finish(plan, section, ends, running), plan.sections)
        for section, (state, found) in zip(plan.sections, finished, strict=True):
            states[section.name], lines = state, lines + found
            print(f"{section.name:12} {state['seconds']:6.1f} s  {state['status']}", flush=True)
            summary = summarised(plan, states, lines)
            (plan.out / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(running):
            end_group(child)
    return summary


def finish(
    plan: RunPlan, section: Section, ends: float, running: "set[subprocess.Popen[bytes]]"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs one section if time is left; returns its state and its lines."""
    began = time.monotonic()
    limit = min(plan.limit(section), ends - began)
    if limit < _SHORTEST:
        return {"status": "dropped: no time was left", "seconds": 0.0}, []
    code = run_section(plan, section, limit, running)
    found = lines_of(plan.out / f"{section.name}.jsonl")
    status = status_of(found, code, limit, plan.out, section.name)
    processor = next((line["processor_seconds"] for line in found if line["kind"] == "end"), None)
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": processor,
    }, found


def run_section(plan: RunPlan, section: Section, limit: float, running: "set[subprocess.Popen[bytes]]") -> int | None:
    """Runs one section, in ``running`` meanwhile; returns its exit status, None where it was killed at its limit."""
    file = plan.out / f"{section.name}.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", section.name, "--out", str(plan.out.resolve())]
    command += ["--seconds", f"{limit:.1f}", "--device", plan.device, *(["--tiny"] if plan.tiny else [])]
    with (plan.out / f"{section.name}.log").open("wb") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment(plan), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        running.add(child)
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(child)
            running.discard(child)


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Ends whatever is left of a section's process group, which only its own descendants are in."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment(plan: RunPlan) -> dict[str, str]:
    """The variables of a section: this checkout first, and NVML instead of a context to look for devices."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if plan.device == "cuda":
        added |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_MODULE_LOADING": "LAZY"}
    else:
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a section; one that a kill has cut short is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def status_of(lines: Sequence[Mapping[str, Any]], code: int | None, limit: float, out: Path, name: str) -> str:
    """One of "ok", "needs cuda: why", "late: ...", "failed: ..."."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    if failed := by_kind.get("failed"):
        return (
            f"failed: {len(failed)} of its cases, first {failed[0]['case']}: {failed[0]['error'].splitlines()[0][:160]}"
        )
    if code is None:
        return f"late: killed after {limit:.0f} s; {len(by_kind.get('row', []))} rows"
    if code != 0 or "end" not in by_kind:
        log = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return f"failed: exit status {code}: {log[-1][:160] if log else 'no output'}"
    if "row" in by_kind:
        dropped = by_kind.get("dropped", [])
        return f"late: {len(dropped)} cases dropped" if dropped else "ok"
    if needed := by_kind.get("needs cuda"):
        return f"needs cuda: {needed[0]['why']}"
    return "failed: it measured nothing"


def summarised(plan: RunPlan, states: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that was found: the machine, the sections, the goals, the rows."""
    machine: Mapping[str, str] = next((line["facts"] for line in lines if line["kind"] == "machine"), {})
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "tiny": plan.tiny,
        "device": plan.device,
        "machine": machine,
        "sections": dict(states),
        "goals": judged([line for line in lines if line["kind"] == "row"]),
        "lines": [line for line in lines if line["kind"] not in ("machine", "end")],
    }
