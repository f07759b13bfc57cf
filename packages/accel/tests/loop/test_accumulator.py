"""The accumulation clock, with loaders that are plain data."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.loop.accumulator import PATIENCE, GradientAccumulationPlugin, StepClock
from accel_state.errors import ConfigError


@dataclass
class Planned:
    index: int
    size: int
    share: float


class FakeLoader:
    """A loader of ``batches`` batches that says what a real one would about the batch just delivered."""

    def __init__(self, batches: int, *, known: bool = True) -> None:
        self.batches = batches
        self.known = known
        self.delivered = 0
        self.remainder = 0
        self.window: Planned | None = None
        self.real_counts: tuple[int, ...] | None = None
        self.weight = 1.0
        self.claimed = True

    def claim(self) -> None:
        self.claimed = True

    def disclaim(self) -> None:
        self.claimed = False

    @property
    def end_of_dataloader(self) -> bool:
        return self.delivered == self.batches

    @property
    def batches_left(self) -> int | None:
        return self.batches - self.delivered if self.known else None


def run(clock: StepClock, loader: FakeLoader) -> list[tuple[bool, float, float]]:
    """One pass: (due, share, correction) of every micro-batch."""
    seen = []
    clock.began(loader)
    for number in range(1, loader.batches + 1):
        loader.delivered = number
        clock.tick()
        seen.append((clock.due, clock.share, clock.correction))
    clock.ended(loader)
    return seen


def test_a_pass_is_claimed_by_a_backward_in_it() -> None:
    clock, trained, evaluated = clock_of(1), FakeLoader(2), FakeLoader(2)
    clock.began(trained)
    assert not trained.claimed
    clock.claim_passes()
    clock.ended(trained)
    clock.began(evaluated)
    clock.ended(evaluated)
    clock.claim_passes()
    assert (trained.claimed, evaluated.claimed) == (True, False)


def clock_of(num_steps: int, **options: bool) -> StepClock:
    return StepClock(GradientAccumulationPlugin(num_steps=num_steps, **options))


def test_five_batches_in_windows_of_two_sync_as_the_contract_says() -> None:
    clock, loader, steps = clock_of(2), FakeLoader(5), []
    clock.began(loader)
    for number in range(1, 6):
        loader.delivered = number
        clock.tick()
        steps.append((clock.due, clock.step))
    assert steps == [(False, 1), (True, 2), (False, 3), (True, 4), (True, 0)]


@given(batches=st.integers(1, 40), num_steps=st.integers(1, 9), known=st.booleans(), epochs=st.integers(1, 3))
def test_every_window_weighs_one(batches: int, num_steps: int, known: bool, epochs: int) -> None:
    clock = clock_of(num_steps)
    for _ in range(epochs):
        weight = 0.0
        windows = []
        for due, share, correction in run(clock, FakeLoader(batches, known=known)):
            weight += share
            if due:
                windows.append(weight * correction)
                weight = 0.0
        assert weight == 0.0, "a window was left open at the end of the loader"
        assert windows == pytest.approx([1.0] * -(-batches // num_steps))


def test_a_short_last_window_is_known_beforehand_for_sized_loaders() -> None:
    assert [round(share, 6) for _, share, _ in run(clock_of(3), FakeLoader(5))] == [0.333333] * 3 + [0.5] * 2


def test_a_short_last_window_of_a_stream_is_corrected() -> None:
    due, share, correction = run(clock_of(3), FakeLoader(5, known=False))[-1]
    assert due
    assert share * 2 * correction == pytest.approx(1.0)


def test_windows_cross_epochs_without_sync_with_dataloader() -> None:
    clock = clock_of(2, sync_with_dataloader=False)
    assert [due for due, _, _ in run(clock, FakeLoader(3)) + run(clock, FakeLoader(3))] == [False, True] * 3


def weights_of_windows(
    clock: StepClock, passes: list[tuple[FakeLoader, int]], change: dict[int, int]
) -> list[tuple[int, float]]:
    """Micro-batches and weight of each window, over passes of so many batches; ``change`` sets the number of steps."""
    windows, count, weight, number = [], 0, 0.0, 0
    for loader, batches in passes:
        clock.began(loader)
        for loader.delivered in range(1, batches + 1):
            if number in change:
                clock.num_steps = change[number]
            due = clock.tick()
            number, count, weight = number + 1, count + 1, weight + clock.share
            if due:
                windows.append((count, round(weight * clock.correction, 6)))
                count, weight = 0, 0.0
        clock.ended(loader)
    return windows


def test_a_number_of_steps_that_changes_inside_a_window_counts_from_the_next() -> None:
    windows = weights_of_windows(clock_of(4), [(FakeLoader(14), 14)], {7: 3})
    assert windows == [(4, 1.0), (4, 1.0), (3, 1.0), (3, 1.0)]


def test_windows_that_begin_after_a_change_are_full() -> None:
    assert weights_of_windows(clock_of(4), [(FakeLoader(10), 10)], {4: 3}) == [(4, 1.0), (3, 1.0), (3, 1.0)]


def test_a_number_of_steps_set_between_micro_batch_and_backward_does_not_change_its_share() -> None:
    clock = clock_of(4)
    clock.tick()
    clock.num_steps = 8
    assert clock.share == 1 / 4


def test_a_pass_abandoned_before_its_last_batch_leaves_no_window_of_double_weight() -> None:
    loader = FakeLoader(10)  # the window of its last two batches begins, and ends in the next pass
    windows = weights_of_windows(clock_of(4), [(loader, 9), (loader, 9)], {})
    assert windows == [(4, 1.0), (4, 1.0), (2, 1.0), (4, 1.0), (4, 1.0)]


def test_a_window_resumed_with_fewer_steps_keeps_the_number_that_it_began_with() -> None:
    saved = clock_of(4)
    for _ in range(3):
        saved.tick()
    resumed = clock_of(3)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.tick(), resumed.share, resumed.correction) == (True, 1 / 4, 1.0)


def test_groups_of_models_have_windows_of_their_own() -> None:
    clock = clock_of(2)
    dues = [(clock.tick((0,)), clock.tick((1,))) for _ in range(4)]
    assert dues == [(False, False), (True, True)] * 2


class Updates(list[bool]):
    """Whether each update of the loss scale was held."""

    def update(self, *, hold: bool = False) -> None:
        self.append(hold)

    def overflow_dropped(self) -> bool:
        return False


def test_the_loss_scale_is_settled_once_a_round() -> None:
    clock, updates = clock_of(1), Updates()
    for _ in range(3):
        for key in ((0,), (1,)):
            clock.tick(key)
            clock.settle_scale(updates)
            clock.stepped(None)
    assert updates == [False, False]  # before the second and the third round


def test_an_unfinished_window_holds_the_loss_scale_until_it_counts_as_abandoned() -> None:
    clock, updates = clock_of(2), Updates()
    clock.tick((1,))
    for _ in range(PATIENCE + 2):
        clock.tick((0,))
        clock.tick((0,))
        clock.settle_scale(updates)
        clock.stepped(None)
    assert updates == [True] * PATIENCE + [False]


def test_an_inner_loop_gives_the_outer_one_back() -> None:
    clock, outer, inner = clock_of(1), FakeLoader(2), FakeLoader(1)
    clock.began(outer)
    clock.began(inner)
    assert clock.active_loader is inner
    clock.ended(inner)
    assert clock.active_loader is outer
    clock.ended(outer)
    assert clock.active_loader is None


def test_a_dropped_loader_is_not_kept_alive() -> None:
    clock, loader = clock_of(1), FakeLoader(2)
    clock.began(loader)
    del loader
    assert clock.active_loader is None


def test_planned_windows_of_the_loader_are_followed() -> None:
    clock, loader = clock_of(4), FakeLoader(4)
    clock.began(loader)
    seen = []
    for index, size, share in ((0, 2, 0.5), (1, 2, 0.7), (0, 1, 1.0)):
        loader.window = Planned(index, size, share)
        seen.append((clock.tick(), clock.share))
    assert seen == [(False, 0.5), (True, 0.7), (True, 1.0)]


def test_a_planned_window_weighs_one_with_what_an_abandoned_pass_has_left() -> None:
    clock, loader = clock_of(4), FakeLoader(4)
    clock.began(loader)
    weights = [0.0]
    for index in (0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3):  # two passes are left inside a window of four
        loader.window = Planned(index, 4, 0.25)
        due = clock.tick()
        weights[-1] += clock.share
        if due:
            weights[-1] *= clock.correction
            weights.append(0.0)
    assert weights == pytest.approx([1.0, 1.0, 0.0])


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5])
def test_a_restored_clock_goes_on_where_it_was(ticks: int) -> None:
    clock = clock_of(3)
    for _ in range(ticks):
        clock.tick()
    other = clock_of(3)
    other.load_state_dict(clock.state_dict())
    assert other.open == clock.open
    assert [(other.tick(), other.share, other.step) for _ in range(7)] == [
        (clock.tick(), clock.share, clock.step) for _ in range(7)
    ]


def test_a_restored_window_weighs_one_with_what_an_abandoned_pass_has_left() -> None:
    clock, loader = clock_of(4), FakeLoader(4)
    clock.began(loader)
    for index in (0, 1, 0):  # a pass is left inside a window, and the next window begins
        loader.window = Planned(index, 4, 0.25)
        clock.tick()
    other = clock_of(4)
    other.began(loader)
    other.load_state_dict(json.loads(json.dumps(clock.state_dict())))
    for index in (1, 2, 3):
        loader.window = Planned(index, 4, 0.25)
        assert other.tick() == clock.tick()
    assert other.correction == clock.correction == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True, "2"])
def test_a_number_of_steps_that_cannot_be_is_refused(num_steps: object) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        GradientAccumulationPlugin(num_steps=num_steps)  # type: ignore[arg-type]
