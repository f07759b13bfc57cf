"""Loops of random settings read, gather and learn on accel what they do on Accelerate, in as many processes."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
LOOPS = str(Path(__file__).parent / "programs" / "loops.py")


def assert_equal(found: Any, expected: Any, where: str) -> None:
    """Floats to what float32 rounds, and all else exactly; names the first value that differs."""
    for place, (mine, other) in enumerate(zip(found, expected, strict=True)):
        same = mine == pytest.approx(other, rel=1e-4, abs=1e-6) if isinstance(other, float) else mine == other
        assert same, f"{where}, value {place}: {mine}, with Accelerate {other}"


@pytest.mark.parametrize(
    ("count", "processes"),
    [(25, 1), (25, 2), pytest.param(400, 1, marks=pytest.mark.slow), pytest.param(300, 2, marks=pytest.mark.slow)],
)
def test_loops_are_those_with_accelerate(launched, accelerated, count, processes):
    found, expected = launched(processes, LOOPS, str(count)), accelerated(LOOPS, str(count), processes=processes)
    assert len(expected) == count
    for number, ranks in expected.items():
        for rank, seen in enumerate(ranks):
            assert_equal(found[number][rank], seen, f"loop {number} on rank {rank}")
