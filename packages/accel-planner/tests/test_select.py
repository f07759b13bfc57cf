"""Selection: the fastest plan that fits, and what would change the choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_planner import Candidate, Hardware, MemoryPlan, PlanError, choose, ranked
from accel_planner.cost.communication import Traffic
from accel_planner.cost.model import Parts
from accel_planner.select import fits, usable
from accel_state.errors import ConfigError

GB = 10**9


def made(name: str, peak: int, seconds: float, memory: int = 100, host: int = 0) -> MemoryPlan:
    parts = Parts(peak, 0, 0, 0, 0, 0, 0, host)
    hardware = Hardware(memory=memory, host_memory=50)
    return MemoryPlan(Candidate(name, "ddp"), hardware, parts, peak, Traffic(0, 0, 0, 0), seconds)


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=12)


@pytest.mark.parametrize("margin", [1, -0.1])
def test_a_margin_that_is_no_fraction_is_refused(margin: float) -> None:
    with pytest.raises(ConfigError, match=f"margin is {margin}; expected a fraction from 0 and below 1"):
        choose([made("ddp", GB, 1)], 80 * GB, margin)


@given(sizes, st.integers(1, 400), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_choice_fits_and_nothing_faster_does(found: list[tuple[int, int]], budget: int, margin: float) -> None:
    every = [made(str(at), peak, seconds) for at, (peak, seconds) in enumerate(found)]
    fitting = [plan for plan in every if plan.peak <= usable(budget, margin)]
    if not fitting:
        with pytest.raises(PlanError, match="Nearest is"):
            choose(every, budget, margin)
        return
    decision = choose(every, budget, margin)
    assert decision.plan in fitting
    assert decision.plan.seconds == min(plan.seconds for plan in fitting)
    assert all(plan.peak > usable(budget, margin) for plan in decision.faster)


def test_a_choice_says_what_would_change_it() -> None:
    decision = choose([made("ddp", 150 * GB, 1), made("fsdp", 60 * GB, 2), made("slow", 10 * GB, 3)], 80 * GB, 0.0)
    assert decision.plan.candidate.name == "fsdp"
    assert decision.changes == ("with 65.2 GiB more per device: ddp",)
    assert "1 faster one does not fit" in str(decision)


def test_more_memory_of_the_size_that_was_said_does_change_it() -> None:
    every = [made("ddp", 150 * GB, 1), made("fsdp", 60 * GB, 2)]
    assert choose(every, 80 * GB).changes == ("with 80.72 GiB more per device: ddp",)
    assert choose(every, 80 * GB + int(80.72 * 2**30)).plan.candidate.name == "ddp"


def test_nothing_that_fits_names_the_nearest_and_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"Nearest is small, which needs 88.48 GiB per device, 4.657 GiB too much"):
        choose([made("big", 200 * GB, 1, 100 * GB), made("small", 95 * GB, 2, 100 * GB)])


def test_offloading_needs_room_on_the_host() -> None:
    with pytest.raises(PlanError, match="nothing fits the host memory"):
        choose([made("offload", 10, 1, host=60)])


@pytest.mark.parametrize("budget", range(1, 12))
def test_in_simulated_budgets_the_choice_fits_and_the_next_faster_does_not(
    plans: dict[str, MemoryPlan], budget: int
) -> None:
    order = ranked(plans.values())
    smallest, largest = min(plan.peak for plan in order), max(plan.peak for plan in order)
    memory = int(smallest + (largest - smallest) * budget / 11) + 1
    decision = choose(order, memory, 0.0)
    assert fits(decision.plan, memory, 0.0)
    place = order.index(decision.plan)
    assert place == len(decision.faster)
    assert not any(fits(plan, memory, 0.0) for plan in order[:place])
