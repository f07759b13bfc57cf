"""The suite of contracts itself: a backend that breaks a promise is reported, and as what."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_testing.contracts import CASES, Case, Driver, check_case
from accel_testing.contracts.driver import AccelDriver
from accel_testing.contracts.loops import error, momentum
from accel_testing.contracts.models import Stack
from accel_testing.contracts.outcome import Ending, judge
from accel_testing.equivalence.layouts import Layout
from accel_testing.equivalence.training import open_accelerator
from accel_testing.ranks.pool import RankPool

WEIGHT = {"stem.weight": torch.tensor([1.0, -2.0], dtype=torch.float64)}
REFUSAL = Ending(error="PrepareError: stem.weight is not averaged; freeze it", ours=True, position=1)


def verdict(*endings: Ending, since: int | None = 1, names: tuple[str, ...] = ("stem.weight",)) -> str:
    return judge(WEIGHT, endings, tolerance=1e-10, since=since, names=names).verdict


def moved(by: float) -> Ending:
    return Ending({name: tensor + by for name, tensor in WEIGHT.items()})


def test_the_same_tensors_on_all_ranks_are_equal():
    assert verdict(moved(0.0), moved(1e-12)) == "equal"


def test_a_rank_that_keeps_no_state_is_equal():
    assert verdict(moved(0.0), Ending()) == "equal"


@pytest.mark.parametrize("by", [1e-6, float("nan"), float("inf")])
def test_other_tensors_on_any_rank_are_different(by: float):
    assert verdict(moved(by), moved(0.0)) == "different"
    assert verdict(moved(0.0), moved(by)) == "different"


def test_tensors_that_the_main_process_lacks_are_different():
    assert verdict(Ending(), moved(0.0)) == "different"


def test_another_shape_is_different():
    assert verdict(Ending({"stem.weight": torch.zeros(3)}), Ending()) == "different"


def test_a_refusal_by_name_on_all_ranks_is_refused():
    assert verdict(REFUSAL, REFUSAL) == "refused"


def test_a_refusal_on_one_rank_alone_is_uneven():
    assert verdict(REFUSAL, moved(0.0)) == "uneven"
    assert verdict(REFUSAL, replace(REFUSAL, ours=False)) == "uneven"
    assert verdict(REFUSAL, replace(REFUSAL, position=0)) == "uneven"


def test_a_raw_error_is_raised():
    assert verdict(*2 * [replace(REFUSAL, ours=False)]) == "raised"


def test_a_refusal_after_the_step_in_which_it_is_due_is_late():
    assert verdict(*2 * [replace(REFUSAL, position=2)]) == "late"


def test_a_refusal_of_what_no_backend_may_refuse_is_late():
    assert verdict(REFUSAL, REFUSAL, since=None) == "late"


def test_a_refusal_that_names_nothing_of_the_model_is_unnamed():
    assert verdict(*2 * [replace(REFUSAL, error="PrepareError: a system.weightless thing")]) == "unnamed"


def ordinary(driver: Driver, model: nn.Module) -> nn.Module:
    """What a backend that averages nothing trains."""
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():
        with driver.no_sync(model):
            driver.backward(error(model, batch))
        built.step()
        built.zero_grad()
    return model


def broken_on_rank_1(driver: Driver, model: nn.Module, *, failure: str) -> nn.Module:
    """What a backend trains in whose backward one rank fails."""
    model, built = driver.prepare(model, momentum(model))
    for batch in driver.batches():
        if driver.process_index == 1:
            if failure == "raises":
                raise RuntimeError("stem.weight broke")
            time.sleep(600)
        driver.backward(error(model, batch))
        built.step()
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (ordinary, "different"),
        (partial(broken_on_rank_1, failure="raises"), "raised uneven"),
        (partial(broken_on_rank_1, failure="hangs"), "hung"),
    ],
    ids=["gradients not averaged", "an error on one rank", "a hang"],
)
def test_ranks_that_break_a_promise_are_reported(rank_pool: RankPool, train, expected: str):
    outcome = check_case(Case("broken", Stack, train), "ddp:2", rank_pool, timeout=5.0 if expected == "hung" else 60.0)
    assert outcome.verdict in expected.split()
    assert not outcome.ok


CARELESS = """
from accel_backends import ModuleBackend


class CarelessBackend(ModuleBackend):
    name = "careless"

    def wrap(self, model):
        return model
"""


def test_a_backend_of_another_package_runs_the_suite(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that averages nothing fails it on two ranks, and passes on one."""
    (tmp_path / "careless.py").write_text(CARELESS)
    information = tmp_path / "careless-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text("[accel.backends]\ncareless = careless:CarelessBackend\n")
    monkeypatch.syspath_prepend(tmp_path)
    plain = next(case for case in CASES if case.name == "plain")
    assert check_case(plain, "careless", rank_pool).verdict == "equal"
    assert check_case(plain, "careless:2", rank_pool).verdict == "different"


def test_a_layout_that_is_none_of_a_case_is_refused(rank_pool: RankPool):
    case = next(case for case in CASES if case.options)
    with pytest.raises(ValueError, match="contract of"):
        check_case(case, "single", rank_pool)
    with pytest.raises(ValueError, match="by itself"):
        check_case(CASES[0], "ddp:2/acc=3", rank_pool)
    with pytest.raises(ValueError, match="bf16"):
        check_case(CASES[0], "ddp:2/bf16", rank_pool)


def routes_of_rank(case: Case) -> list[Tensor]:
    accelerator = open_accelerator(Layout.parse("ddp:2/fp64"))
    driver = AccelDriver(accelerator, case.samples(torch.float64), copies=case.copies, micro_batches=case.accumulate)
    routes = [batch.route for batch in driver.batches()]
    accelerator.end_training()
    return routes


def test_every_rank_has_the_samples_of_its_half(rank_pool: RankPool):
    """Otherwise no case would find ranks that use different parts."""
    case = next(case for case in CASES if case.name == "ranks use different parts")
    for rank, routes in enumerate(rank_pool.run(routes_of_rank, case)):
        assert len(routes) == case.steps
        assert all(route.tolist() == [rank] * 6 for route in routes)
