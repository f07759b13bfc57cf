"""Positions of loaders in a run: which passes a resumed run goes on with, and which it begins anew."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel_state.errors import CheckpointError

SIZE, BATCH = 24, 4


class Script:
    """A run with a loader to train on, another for a second network, and one to evaluate on."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        model, optimizer = nn.Linear(1, 1), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [DataLoader(range(SIZE), BATCH, shuffle=shuffle) for shuffle in (True, True, False)]
        self.model, self.optimizer, *prepared = self.accelerator.prepare(model, optimizer, *loaders)
        self.train, self.second, self.test = prepared

    def step(self, batch: torch.Tensor) -> None:
        self.accelerator.backward(self.model(batch.float()[:, None]).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def resumed(folder: Path, **options: Any) -> Script:
    script = Script(**options)
    script.accelerator.load_state(folder)
    return script


def test_an_evaluation_of_a_few_batches_begins_anew_after_a_resume(tmp_path: Path) -> None:
    script = Script()
    for number, batch in enumerate(script.train):
        script.step(batch)
        if number == 2:
            for _ in script.test:
                break
            script.accelerator.save_state(tmp_path / "inside")
    rest = resumed(tmp_path / "inside")
    assert [batch[0] for batch in rows(rest.test)] == [0, 4, 8, 12, 16, 20]
    assert len(rows(rest.train)) == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_training_that_was_left_by_a_break_goes_on_behind_it(tmp_path: Path, by_hand: bool) -> None:
    """As a script leaves its loop when its machine is taken away, and saves then."""
    script, first = Script(), []
    for number, batch in enumerate(script.train):
        first.append(batch.tolist())
        if by_hand:
            script.model(batch.float()[:, None]).sum().backward()
            script.optimizer.step()
        else:
            script.step(batch)
        if number == 1:
            break
    script.accelerator.save_state(tmp_path / "left")
    rest = resumed(tmp_path / "left")
    assert sorted(chain.from_iterable(first + rows(rest.train))) == list(range(SIZE))
    assert rest.train.epoch == 1


def test_an_evaluation_on_the_training_data_right_before_a_break_takes_nothing_of_the_rest(tmp_path: Path) -> None:
    script, seen = Script(), []
    for number, batch in enumerate(script.train):
        script.step(batch)
        seen.append(batch.tolist())
        if number == 1:
            for _ in script.train:
                break
            break
    script.accelerator.save_state(tmp_path / "left")
    rest = resumed(tmp_path / "left")
    assert sorted(chain.from_iterable(seen + rows(rest.train))) == list(range(SIZE))


def test_both_loaders_of_a_training_with_two_are_resumed(tmp_path: Path) -> None:
    script, seen = Script(), []
    for number, (one, two) in enumerate(zip(script.train, script.second, strict=True)):
        script.step(one)
        script.step(two)
        seen += [one.tolist(), two.tolist()]
        if number == 1:
            break
    script.accelerator.save_state(tmp_path / "left")
    rest = resumed(tmp_path / "left")
    for part, loader in enumerate((rest.train, rest.second)):
        assert sorted(chain.from_iterable(seen[part::2] + rows(loader))) == list(range(SIZE))


def test_a_look_at_the_data_whose_iterator_is_kept_is_none_of_the_trainings_passes(tmp_path: Path) -> None:
    script, seen = Script(), []
    kept = iter(script.train)
    next(kept)
    for number, batch in enumerate(script.train):
        script.step(batch)
        seen.append(batch.tolist())
        if number == 2:
            script.accelerator.save_state(tmp_path / "inside")
            break
    rest = resumed(tmp_path / "inside")
    assert sorted(chain.from_iterable(seen + rows(rest.train))) == list(range(SIZE))
    kept.close()


@pytest.mark.parametrize("saved", [True, False])
def test_a_load_that_is_refused_in_a_loop_leaves_the_position_counting(saved: bool, tmp_path: Path) -> None:
    class Refusing:
        refuses = False

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.refuses:
                raise ValueError("not this one")

    script, refusing = Script(), Refusing()
    script.accelerator.register_for_checkpointing(refusing)
    if saved:
        rows(script.train)
    script.accelerator.save_state(tmp_path / "one")
    seen: list[list[int]] = []
    refusing.refuses = True
    for number, batch in enumerate(script.train):
        script.step(batch)
        seen.append(batch.tolist())
        if number == 1:
            with pytest.raises(ValueError, match="not this one"):
                script.accelerator.load_state(tmp_path / "one")
            with pytest.raises(CheckpointError):
                script.accelerator.load_state(tmp_path / "none")
        if number == 3:
            script.accelerator.save_state(tmp_path / "two")
            break
    again = Script()
    again.accelerator.register_for_checkpointing(Refusing())
    again.accelerator.load_state(tmp_path / "two")
    assert sorted(chain.from_iterable(seen + rows(again.train))) == list(range(SIZE))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.sampled(1)
def test_an_epoch_that_ended_is_followed_by_the_next(rank: int, dispatch: bool, counted: bool, tmp_path: Path) -> None:
    options = {"dataloader_config": DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=1)}
    script = Script(**options)
    for number, batch in enumerate(script.train):
        script.step(batch)
        if number == len(script.train) - 1:
            script.accelerator.save_state(tmp_path / "ended")
    second = rows(script.train)
    rest = resumed(tmp_path / "ended", **options)
    if counted:
        rest.train.set_epoch(0)
        assert rows(rest.train) == []
        rest.train.set_epoch(1)
    assert rows(rest.train) == second
