"""The lane of launched tests fails when one of its runs does, and repeats what failed as it was."""

from pathlib import Path

import pytest

from ci.launched import hash_seed, in_turn, outcome


@pytest.mark.parametrize(
    ("statuses", "repeating", "expected"),
    [
        ([0, 0, 0], False, 0),
        ([0, 1, 0], False, 1),
        ([-9, 0, 0], False, -9),
        ([0, 5, 0], False, 5),
        ([5, 0, 5], True, 0),
        ([5, 1, 5], True, 1),
        ([5, -11, 5], True, -11),
    ],
)
def test_any_run_that_is_no_success_is_the_outcome(statuses: list[int], repeating: bool, expected: int) -> None:
    assert outcome(statuses, repeating=repeating) == expected


def test_a_repetition_has_the_hash_seed_of_the_first_runs(tmp_path: Path) -> None:
    first = hash_seed(tmp_path / "cache", repeating=False)
    assert hash_seed(tmp_path / "cache", repeating=True) == first
    assert {hash_seed(tmp_path / "cache", repeating=False) for _ in range(20)} != {first}


def test_consecutive_seeds_choose_each_launcher_once_for_each_script() -> None:
    chosen = [[run[:2] for run in in_turn("abc", ["accel", "torchrun"], seed) if run[2]] for seed in (6, 7)]
    assert chosen[0] == [("a", "accel"), ("b", "torchrun"), ("c", "accel")]
    assert chosen[1] == [("a", "torchrun"), ("b", "accel"), ("c", "torchrun")]
