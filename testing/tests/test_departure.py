"""The departure of a run from its reference: its step, and what differs there."""

import math
import re
from dataclasses import replace

import pytest
import torch

from accel_testing.equivalence.divergence import compare_runs
from accel_testing.equivalence.program import (
    Program,
    join_batches,
    map_tensors,
    momentum_sgd,
    take_samples,
    uneven_sizes,
)
from accel_testing.equivalence.training import TrainedStep


def step(weights: float, **changes: object) -> TrainedStep:
    plain = TrainedStep(8.0, 4.0, 2.0, (0.1,), tensors={"w": torch.tensor([1.0, weights], dtype=torch.float64)})
    return replace(plain, **changes)  # type: ignore[arg-type]


REFERENCE = [step(2.0), step(3.0), step(4.0)]


def test_halves_on_two_ranks_are_the_whole() -> None:
    halves = [replace(one, loss=4.0, weight=2.0) for one in REFERENCE]
    assert compare_runs(REFERENCE, [halves, halves], tolerance=1e-10) is None


def test_peers_with_the_same_samples_count_once() -> None:
    assert compare_runs(REFERENCE, [REFERENCE, REFERENCE], tolerance=1e-10) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": 8.1}, "the loss is 2.025 instead of 2"),
        ({"loss": math.nan}, "the loss is nan instead of 2"),
        ({"norm": 6.0}, "the gradient norm is 6 instead of 2 (3 times it)"),
        ({"norm": 0.5}, "the gradient norm is 0.5 instead of 2 (1/4 of it)"),
        ({"norm": 2.3}, "the gradient norm is 2.3 instead of 2"),
        ({"rates": (0.2,)}, "the learning rates are [0.2] instead of [0.1]"),
        ({"skipped": True}, "the optimizer step was skipped on ranks [0]"),
        ({"loss": 6.0, "weight": 3.0}, "the ranks saw samples of weight 3 instead of 4"),
        ({"tensors": {"w": torch.tensor([1.0, 3.3]).double()}}, "w: off by 0.3 (0.075 relative) in 1 of 2 elements"),
    ],
)
def test_first_departure_says_step_and_thing(change: dict[str, object], words: str) -> None:
    departure = compare_runs(REFERENCE, [[REFERENCE[0], step(3.0, **change), step(9.0)]], tolerance=1e-10)
    assert departure is not None
    assert departure.step == 1
    assert words in str(departure)


@pytest.mark.parametrize("change", [{"loss": math.nan}, {"norm": math.nan}])
def test_a_reference_that_is_not_a_number_is_named(change: dict[str, float]) -> None:
    reference = [REFERENCE[0], replace(REFERENCE[1], **change)]  # type: ignore[arg-type]
    departure = compare_runs(reference, [reference], tolerance=1e-10)
    assert departure is not None
    assert departure.step == 1
    assert "of the reference is" in str(departure)
    assert "nan" in str(departure)


def test_a_step_in_which_nothing_counts_is_compared_by_its_sum() -> None:
    reference = [REFERENCE[0], replace(REFERENCE[1], loss=0.0, weight=0.0)]
    assert compare_runs(reference, [reference, reference], tolerance=1e-10) is None
    run = [REFERENCE[0], replace(REFERENCE[1], loss=4.0, weight=2.0)]
    assert "the ranks saw samples of weight 2 instead of 0" in str(compare_runs(reference, [run], tolerance=1e-10))


def test_replicas_that_come_apart_are_named() -> None:
    other = [replace(one, digests={"w": 1}) for one in REFERENCE]
    mine = [replace(one, digests={"w": 2}) for one in REFERENCE]
    assert "rank 1 has another w than rank 0" in str(compare_runs(REFERENCE, [mine, other], tolerance=1e-10))


@pytest.mark.parametrize("count", [2, 4])
def test_number_of_steps_is_compared(count: int) -> None:
    run = [*REFERENCE, step(5.0)][:count]
    departure = compare_runs(REFERENCE, [run], tolerance=1e-10)
    assert f"the ranks took {count} optimizer steps, the reference 3" in str(departure)


def test_tolerance_is_the_callers() -> None:
    near = [step(2.0), step(3.0 + 1e-6), step(4.0)]
    assert compare_runs(REFERENCE, [near], tolerance=1e-5) is None
    assert compare_runs(REFERENCE, [near], tolerance=1e-8) is not None


@pytest.mark.parametrize(("total", "parts", "zeros"), [(24, 6, False), (24, 6, True), (4, 4, False), (7, 3, True)])
def test_uneven_sizes_are_uneven_and_complete(total: int, parts: int, zeros: bool) -> None:
    sizes = uneven_sizes(total, parts, zeros=zeros)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert (0 in sizes) == zeros
    assert total == parts or len(set(sizes)) > 1


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples cannot be spread over 4 micro-batches"):
        uneven_sizes(3, 4)


def test_batches_keep_their_kind() -> None:
    batches = [{"x": torch.ones(2, 3), "y": (torch.zeros(2), "text")}] * 2
    joined = join_batches(batches)
    assert joined["x"].shape == (4, 3)
    taken = take_samples(joined, [0, 3, 1])
    assert map_tensors(lambda tensor: tensor + len(tensor), taken)["y"][0].tolist() == [3.0] * 3
    assert taken["y"][1] == "text"


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "the program has no batches"),
        ([torch.ones(2), torch.ones(3)], "hold [2, 3] samples"),
        ([[torch.ones(2), torch.ones(3)]], "must share a first dimension of samples; theirs are [2, 3]"),
        ([torch.tensor(1.0)], "must share a first dimension of samples"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batches: list[object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Program(torch.nn.Linear(1, 1), lambda model, batch: model(batch).sum(), batches, momentum_sgd)


def test_tensor_that_passes_through_zero_is_measured_by_its_size_in_the_run() -> None:
    reference = [step(0.0, tensors={"w": torch.tensor([size], dtype=torch.float64)}) for size in (1.0, 1e-4, -1.0)]
    run = [replace(one, tensors={"w": one.tensors["w"] + 1e-3}) for one in reference]
    assert compare_runs(reference, [run], tolerance=1e-2) is None
    assert compare_runs(reference, [run], tolerance=1e-4) is not None


def test_tensor_that_is_only_noise_is_measured_by_the_others() -> None:
    def steps(noise: float) -> list[TrainedStep]:
        return [step(0.0, tensors={"w": torch.ones(1), "noise": torch.tensor([noise])})]

    assert compare_runs(steps(1e-18), [steps(-1e-18)], tolerance=1e-10) is None
