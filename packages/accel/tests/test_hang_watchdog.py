"""What the hang watchdog promises: who is where, told to every rank within seconds, and never a hang."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing import run_command

PROGRAM = Path(__file__).with_name("diverging_ranks.py")
CULPRIT, SECONDS = 1, 10.0
SAMPLE = ("skip:gather", "shape:reduce", "raise:barrier", "stop:gather", "kill:reduce", "skip:backward")
KINDS = {
    "gather": "skip shape dtype structure op extra raise exit stop kill",
    "reduce": "skip shape dtype structure op raise kill",
    "broadcast": "skip shape dtype op exit stop kill",
    "barrier": "skip extra op raise exit kill",
    "backward": "skip extra raise exit stop kill",
    "save": "op raise stop kill",
}
SCENARIOS = tuple(f"{kind}:{where}" for where, kinds in KINDS.items() for kind in kinds.split())


def line_of(mark: str) -> str:
    """``file:line`` of the line of the program with this mark."""
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM.name}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# line: {mark}'))}"


def complaints(found: dict[str, Any]) -> list[str]:
    """What is wrong with how the other ranks were told of rank 1."""
    kind, where = found["scenario"].split(":")
    wrong = [f"rank {rank} hung" for rank in found["hung"]]
    # Where rank 1 went instead, as far as it came anywhere; else what the others wait in for it.
    lines = [{"raise": line_of("raise"), "op": line_of("op"), "skip": line_of("end")}.get(kind, line_of(where))]
    if (kind, where) == ("stop", "save"):
        lines.append(line_of("end"))  # rank 0 may have saved alone, and they then wait for rank 1 in what comes next
    # Where the others could go on without rank 1 (it did more than they), it is rank 1 that is told.
    waited = [rank for rank, said in enumerate(found["said"]) if rank != CULPRIT and "END" not in said]
    for rank in waited or [CULPRIT]:
        said = found["said"][rank]
        error = re.search(r"Collective\w*Error: (.*)", said, re.DOTALL)
        if error is None or not re.search(rf"\branks? (\d, )*{CULPRIT}\b", error[1]):
            wrong.append(f"rank {rank} was not told of rank {CULPRIT}")
        elif not any(line in error[1] for line in lines):
            wrong.append(f"rank {rank} was not told of {' or '.join(lines)}")
        times = [float(seconds) for seconds in re.findall(r"TOLD ([\d.]+)", said)]
        if not times:
            wrong.append(f"rank {rank} did not fail with an error")
        elif times[0] > SECONDS:
            wrong.append(f"rank {rank} was told after {times[0]} s")
    return wrong


def run(scenarios: tuple[str, ...], folder: Path) -> dict[str, dict[str, Any]]:
    done = run_command([sys.executable, PROGRAM, folder, *scenarios], timeout=120 + 50 * len(scenarios)).check()
    found = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"scenario"')]
    return {one["scenario"]: one for one in found}


@pytest.fixture(scope="module")
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was said in the scenarios of the tests that were selected."""
    selected = {item.callspec.params["scenario"] for item in request.session.items if "sampled" in item.fixturenames}
    return run(tuple(one for one in SAMPLE if one in selected), tmp_path_factory.mktemp("sample"))


@pytest.mark.parametrize("scenario", SAMPLE)
@pytest.mark.sampled(2)
def test_every_rank_is_told_who_went_another_way_and_where(scenario: str, sampled: dict[str, dict[str, Any]]) -> None:
    found = sampled[scenario]
    assert complaints(found) == [], "\n".join(found["said"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_of_forty_scenarios_nearly_all_are_told_rightly_and_none_hangs(tmp_path: Path) -> None:
    found = run(SCENARIOS, tmp_path)
    assert len(found) == len(SCENARIOS) == 40
    assert [scenario for scenario, one in found.items() if one["hung"]] == []
    wrong = {scenario: told for scenario, one in found.items() if (told := complaints(one))}
    assert len(wrong) <= 2, wrong
