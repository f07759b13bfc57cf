"""Saving and loading in the middle of what a script has set: default devices, inference mode, a graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel_ckpt
from accel import Accelerator, ProjectConfiguration
from accel_ckpt.loading import checkpoint
from accel_state.errors import CheckpointCorruptError
from accel_state.rng import rng_state
from accel_testing import RankPool


def trained(steps: int = 2) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    step(accelerator, model, optimizer, steps)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "surroundings",
    [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad],
    ids=["meta", "inference", "no_grad"],
)
def test_a_run_is_saved_and_goes_on_whatever_surrounds_the_calls(
    tmp_path: Path, surroundings: Callable[[], AbstractContextManager[object]]
) -> None:
    """The default device "meta" stands for any that is not the CPU."""
    accelerator, model, optimizer = trained()
    with surroundings():
        accelerator.save_state(tmp_path / "a")
    step(accelerator, model, optimizer)
    expected = model.weight.detach().clone()
    other, fresh, its = trained(0)
    with surroundings():
        other.load_state(tmp_path / "a")
    step(other, fresh, its)
    assert torch.equal(fresh.weight, expected)


def test_a_backward_through_weights_that_a_load_has_replaced_is_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    accelerator.save_state(tmp_path / "a")
    loss = model(torch.ones(2, 3)).sum()
    accelerator.load_state(tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerator.backward(loss)


def loaded_while_it_is_replaced(folder: Path, strategy: str | None, times: int) -> tuple[int, bool]:
    """How often the checkpoint was opened, and whether all parameters are those of the last save."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(nn.Linear(8, 8))

    def save(value: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        accelerator.save_state(folder)

    save(0)
    original, opened = checkpoint._opened, []

    def replacing(*args: Any) -> Any:
        found = original(*args)
        opened.append(found)
        if len(opened) <= times:
            with pytest.MonkeyPatch.context() as unpatched:
                unpatched.setattr(checkpoint, "_opened", original)  # saving opens what it has written
                save(len(opened))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_opened", replacing)
        accelerator.load_state(folder)
    full = accelerator.get_state_dict(model)
    return len(opened), all(bool((value == times).all()) for value in full.values())


@pytest.mark.parametrize(("strategy", "ranks"), [(None, 1), ("fsdp", 2)])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_anew(
    tmp_path: Path, strategy: str | None, ranks: int, rank_pool: RankPool
) -> None:
    """It was damage before, with some parameters of the new save."""
    found = rank_pool.run(loaded_while_it_is_replaced, tmp_path / "a", strategy, 2, ranks=ranks)
    assert found == [(3, True)] * ranks


def test_a_checkpoint_that_is_replaced_all_the_time_is_an_error(tmp_path: Path, rank_pool: RankPool) -> None:
    with pytest.raises(CheckpointCorruptError):
        rank_pool.run(loaded_while_it_is_replaced, tmp_path / "a", None, 99, ranks=1)


def test_a_run_beside_another_one_in_the_same_project_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> Accelerator:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        accelerator.prepare(nn.Linear(2, 2))
        return accelerator

    first = opened()
    for _ in range(2):
        first.save_state()
    first.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    first.save_state()  # after a load, a later number is its own
    second = opened()
    second.save_state()
    assert "another run" not in caplog.text
    first.save_state(asynchronous=True)
    assert (
        f"another run has saved checkpoint_3 in {tmp_path / 'checkpoints'} since this one saved checkpoint_2"
        in caplog.text
    )
    caplog.clear()
    first.save_state()
    assert "another run" not in caplog.text


@pytest.mark.parametrize(
    "metadata",
    [
        {"config": "base.yaml"},
        {"config": {"values": 3}},
        {"numbers": [1]},
        {"numbers": {"data_shards": "x"}},
        {"unknown": 5},
        {"companions": [1]},
    ],
    ids=str,
)
def test_metadata_of_another_program_are_no_obstacle(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """A loop of one's own saved the weights, and uses the same names for other things."""
    saved = nn.Linear(2, 2)
    accel_ckpt.save(
        tmp_path / "own",
        {"model": saved.state_dict(), "clock": {"steps": {}}},
        local={"rng": rng_state()},
        metadata=metadata,
    )
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.load_state(tmp_path / "own")
    assert torch.equal(accelerator.unwrap_model(model).weight, saved.weight)
