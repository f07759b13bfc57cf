"""A save between backward and step of a full window is refused by name, and nothing else is."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_ckpt import open_checkpoint
from accel_state.errors import CheckpointError

WORDS = r"between backward and optimizer\.step\(\): the gradients of (weight, bias|bias, weight) are due"


def made(strategy: str | None, accumulate: int = 1) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=accumulate)
    model = nn.Linear(4, 2)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def check(folder: Path, strategy: str | None, accumulate: int, *, asynchronous: bool) -> None:
    accelerator, model, optimizer = made(strategy, accumulate)
    for _ in range(accumulate):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            if accelerator.sync_gradients:
                with pytest.raises(CheckpointError, match=WORDS):
                    accelerator.save_state(folder / "a", asynchronous=asynchronous)
            else:  # an open window keeps its gradients
                accelerator.save_state(folder / "open", asynchronous=asynchronous)
    assert not (folder / "a").exists()
    optimizer.step()
    accelerator.save_state(folder / "a", asynchronous=asynchronous)  # gradients are there still, of a step that is done
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.zero_grad()
    accelerator.save_state(folder / "b", asynchronous=asynchronous)
    accelerator.end_training()
    assert open_checkpoint(folder / "b").names == ["model", "optimizer", "clock"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_due_are_not_lost_silently(tmp_path: Path, accumulate: int, asynchronous: bool) -> None:
    check(tmp_path, None, accumulate, asynchronous=asynchronous)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_are_due_are_not_lost_on_any_rank(tmp_path: Path, strategy: str, accumulate: int) -> None:
    check(tmp_path, strategy, accumulate, asynchronous=False)


def saved_weights(folder: Path, model: nn.Module, name: str = "model") -> bool:
    """Whether the checkpoint holds the model's present weights."""
    saved = open_checkpoint(folder).read(name)
    assert isinstance(saved, dict)
    return all(torch.equal(saved[key], value) for key, value in model.state_dict().items())


def test_a_model_that_nothing_steps_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 2))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.save_state(tmp_path / "a")
    assert saved_weights(tmp_path / "a", model)


def test_who_steps_and_clears_the_inner_optimizer_is_saved(tmp_path: Path) -> None:
    accelerator, model, optimizer = made(None)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad()
    accelerator.save_state(tmp_path / "a")
    assert saved_weights(tmp_path / "a", model)


def test_networks_that_are_stepped_after_all_their_windows_are_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    one, other, first, second = accelerator.prepare(one, other, first, second)
    for model in (one, other):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
    first.step()
    second.step()
    accelerator.save_state(tmp_path / "a")
    assert saved_weights(tmp_path / "a", one)
    assert saved_weights(tmp_path / "a", other, "model_1")


def check_load_into_an_open_window(folder: Path, strategy: str | None) -> None:
    """A window after the load gives the weights that it gives in a run that had no open window."""
    accelerator, model, optimizer = made(strategy, 2)
    accelerator.save_state(folder / "closed")

    def window() -> list[torch.Tensor]:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [getattr(one, "full_tensor", one.clone)().detach().clone() for one in model.parameters()]

    undisturbed = window()
    accelerator.load_state(folder / "closed")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((2, 4), 100.0)).square().mean())
    accelerator.load_state(folder / "closed")
    for own, reference in zip(window(), undisturbed, strict=True):
        assert torch.equal(
            getattr(own, "full_tensor", own.clone)(), getattr(reference, "full_tensor", reference.clone)()
        )
    accelerator.end_training()


def test_a_load_drops_the_open_window_of_the_run_that_loads(tmp_path: Path) -> None:
    check_load_into_an_open_window(tmp_path, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_a_load_drops_the_open_window_on_every_rank(tmp_path: Path, strategy: str) -> None:
    check_load_into_an_open_window(tmp_path, strategy)
