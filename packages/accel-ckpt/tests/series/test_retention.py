from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt import SavedCheckpoint, keep_all, keep_best, keep_every, keep_last, keep_union
from accel_ckpt.series.retention import Retention, to_remove
from accel_state.errors import CheckpointError


def series(*numbers: int, **losses: float) -> list[SavedCheckpoint]:
    return [SavedCheckpoint(n, Path(f"checkpoint_{n}"), {"loss": losses.get(f"at{n}")}) for n in numbers]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (keep_all(), {0, 3, 10, 12, 20}),
        (keep_last(2), {12, 20}),
        (keep_last(9), {0, 3, 10, 12, 20}),
        (keep_every(10), {0, 10, 20}),
        (keep_best("loss"), {3}),
        (keep_best("loss", 2), {3, 12}),
        (keep_best("loss", mode="max"), {20}),
        (keep_union(keep_last(1), keep_every(10), keep_best("loss")), {0, 3, 10, 20}),
    ],
)
def test_policies_keep_what_they_say(policy: Retention, kept: set[int]) -> None:
    saved = series(0, 3, 10, 12, 20, at3=0.1, at12=0.1001, at20=9.0, at0=float("nan"))
    assert policy(saved) == kept


def test_of_equally_good_ones_the_newer_is_kept() -> None:
    assert keep_best("loss")(series(1, 2, at1=0.5, at2=0.5)) == {2}


def test_metrics_may_be_nested() -> None:
    saved = [SavedCheckpoint(n, Path(), {"eval": {"loss": n}, "eval.loss": None} if n else {}) for n in range(3)]
    assert keep_best("eval.loss")(saved) == frozenset()
    nested = [SavedCheckpoint(n, Path(), {"eval": {"loss": -n}}) for n in range(3)]
    assert keep_best("eval.loss")(nested) == {2}


@given(st.sets(st.integers(0, 50), min_size=1), st.sets(st.integers(0, 50)), st.integers(1, 5))
def test_the_newest_and_the_newest_intact_always_stay(numbers: set[int], intact: set[int], count: int) -> None:
    saved = series(*sorted(numbers))
    gone = {entry.number for entry in to_remove(saved, keep_last(count), frozenset(intact))}
    assert max(numbers) not in gone
    assert not numbers & intact or max(numbers & intact) not in gone
    assert to_remove(saved, lambda _: frozenset(), frozenset(intact)) == [
        entry for entry in saved if entry.number not in {max(numbers), max(numbers & intact, default=-1)}
    ]


@pytest.mark.parametrize("make", [keep_last, keep_every, lambda n: keep_best("loss", n)])
@pytest.mark.parametrize("count", [0, -1])
def test_keeping_nothing_is_refused(make: object, count: int) -> None:
    with pytest.raises(CheckpointError, match="would keep nothing"):
        make(count)  # type: ignore[operator]


@pytest.mark.parametrize("make", [keep_last, keep_every, lambda n: keep_best("loss", n)])
@pytest.mark.parametrize("count", [2.5, "3", True])
def test_a_number_that_is_not_whole_is_refused(make: object, count: object) -> None:
    with pytest.raises(CheckpointError, match="expected a whole number, 1 or more"):
        make(count)  # type: ignore[operator]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(CheckpointError, match="mode='lowest'; expected 'min' or 'max'"):
        keep_best("loss", mode="lowest")  # type: ignore[arg-type]
