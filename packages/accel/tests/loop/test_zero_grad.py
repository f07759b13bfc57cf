"""``zero_grad`` at any place of a loop: gradients of a window are cleared once, after its step or in place of it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state.errors import BackendError

ROWS = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0], [100000.0]], dtype=torch.float64)


def prepared(num_steps: int, models: int = 1, **options: Any) -> tuple[Accelerator, list[Any], list[Any]]:
    """Models of one weight, whose gradient is the mean of the rows, and optimizers that subtract it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, **options)
    nets = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(models)]
    for net in nets:
        nn.init.zeros_(net.weight)
    made = accelerator.prepare(*nets, *(torch.optim.SGD(net.parameters(), lr=1.0) for net in nets))
    return accelerator, list(made[:models]), list(made[models:])


def weight(model: Any) -> float:
    return float(model.weight.detach())


def test_a_step_is_that_of_the_window_if_each_micro_batch_begins_with_zero_grad() -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for row in ROWS:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(row).sum())
            optimizer.step()
    assert weight(model) == pytest.approx(-111111 / 3, rel=1e-12)


def test_zero_grad_before_the_block_of_accumulate_clears_the_step_before() -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for row in ROWS:
        optimizer.zero_grad()
        with accelerator.accumulate(model):
            accelerator.backward(model(row).sum())
            optimizer.step()
    assert weight(model) == pytest.approx(-111111 / 3, rel=1e-12)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_zero_grad_in_place_of_the_step_drops_the_window(backward: bool, outside: bool) -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for number, row in enumerate(ROWS):
        with accelerator.accumulate(model):
            if number != 2 or backward:
                accelerator.backward(model(row).sum())
            if number != 2:
                optimizer.step()
            if number != 2 or not outside:
                optimizer.zero_grad()
        if number == 2 and outside:
            optimizer.zero_grad()
    assert weight(model) == pytest.approx(-111000 / 3, rel=1e-12)


def test_a_step_without_a_backward_of_the_last_micro_batch_is_that_of_the_others() -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for number, row in enumerate(ROWS):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            if number != 2:
                accelerator.backward(model(row).sum())
            optimizer.step()
    assert weight(model) == pytest.approx(-111011 / 3, rel=1e-12)


def test_a_window_with_one_backward_is_that_of_its_last_micro_batch() -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for number, row in enumerate(ROWS):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            if number not in (0, 1):
                accelerator.backward(model(row).sum())
            optimizer.step()
    assert weight(model) == pytest.approx(-111100 / 3, rel=1e-12)


def test_two_models_that_step_in_turn_in_windows_of_their_own_clear_first() -> None:
    accelerator, models, optimizers = prepared(3, 2)
    for row in ROWS:
        for model, optimizer in zip(models, optimizers, strict=True):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(row).sum())
                optimizer.step()
    assert [weight(model) for model in models] == pytest.approx([-111111 / 3] * 2, rel=1e-12)


def test_two_optimizers_of_one_window_that_step_in_turn_clear_after_their_steps() -> None:
    accelerator, models, optimizers = prepared(3, 2)
    for row in ROWS:
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward(model(row).sum())
                optimizer.step()
                optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert [weight(model) for model in models] == pytest.approx([-111111 / 3] * 2, rel=1e-12)


def test_two_optimizers_of_one_window_that_clear_between_its_backwards_are_refused() -> None:
    """What the second model has accumulated would be dropped between the two backwards of the last micro-batch."""
    accelerator, models, optimizers = prepared(2, 2)

    def step(row: torch.Tensor) -> None:
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                accelerator.backward(model(row).sum())
                optimizer.step()

    step(ROWS[0])
    with pytest.raises(BackendError, match=r"zero_grad\(\) of SGD has dropped .* window of 2 micro-batches"):
        step(ROWS[1])


def test_a_resumed_window_is_kept_by_zero_grad_before_its_next_micro_batch(tmp_path: Path) -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for number, row in enumerate(ROWS):
        if number == 4:
            accelerator.load_state(accelerator.save_state(tmp_path / "open"))
            assert not accelerator.sync_gradients
        optimizer.zero_grad()
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(row).sum())
            optimizer.step()
    assert weight(model) == pytest.approx(-111111 / 3, rel=1e-12)


@pytest.mark.parametrize("backward", [False, True])
def test_a_window_after_a_dropped_one_is_divided_by_all_its_weights(backward: bool) -> None:
    accelerator, [model], [optimizer] = prepared(2)
    for number, row in enumerate(ROWS[:4]):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            if number != 1 or backward:
                accelerator.backward(model(row).sum() * 3, weight=3)
            if number != 1:
                optimizer.step()
            else:
                optimizer.zero_grad()
    assert weight(model) == pytest.approx(-1100 / 2, rel=1e-12)


@pytest.mark.parametrize("clears", [False, True])
def test_the_closure_of_each_micro_batch_is_evaluated(clears: bool) -> None:
    accelerator, [model], [optimizer] = prepared(3)
    losses = []
    for row in ROWS:

        def closure(row: torch.Tensor = row) -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            loss: torch.Tensor = model(row).sum()
            accelerator.backward(loss)
            return loss

        with accelerator.accumulate(model):
            losses.append(optimizer.step(closure).item())
            if not clears:
                optimizer.zero_grad()
    assert weight(model) == pytest.approx(-111111 / 3, rel=1e-12)
    assert losses == pytest.approx([0.0] * 3 + [-37.0 * row for row in (1e3, 1e4, 1e5)])


def test_a_closure_without_a_backward_changes_nothing() -> None:
    accelerator, [model], [optimizer] = prepared(3)
    for row in ROWS:
        with accelerator.accumulate(model):
            loss = model(row).sum()
            accelerator.backward(loss)
            assert optimizer.step(loss.detach) == loss
            optimizer.zero_grad()
    assert weight(model) == pytest.approx(-111111 / 3, rel=1e-12)


def test_optimizers_that_step_in_turn_evaluate_a_closure_each() -> None:
    accelerator, models, optimizers = prepared(3, models=2)
    for row in ROWS:
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.step(partial(accelerator.backward, model(row).sum()))
                optimizer.zero_grad()
    assert [weight(model) for model in models] == pytest.approx([-111111 / 3] * 2, rel=1e-12)


class Ascending(torch.optim.SGD):
    """Goes backward a second time in a step, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        with torch.enable_grad():
            return closure()


@pytest.mark.parametrize("kind", ["LBFGS", "Ascending"])
def test_an_optimizer_that_goes_backward_again_is_refused_inside_a_window(kind: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(1, 1)
    made = torch.optim.LBFGS(net.parameters(), max_iter=4) if kind == "LBFGS" else Ascending(net.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(net, made)

    def closure() -> torch.Tensor:
        if kind == "LBFGS":
            optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(2, 1)) - 3).square().sum()
        accelerator.backward(loss)
        return loss

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            if kind == "Ascending":
                closure()
            optimizer.step(closure)

    micro_batch()
    with pytest.raises(BackendError, match=f"closure of {kind} goes backward again.*gradient_accumulation_steps=1"):
        micro_batch()


def test_lbfgs_evaluates_its_closure_as_often_as_it_likes_without_accumulation() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=8))
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(2, 1)) - 3).square().sum()
        accelerator.backward(loss)
        calls.append(loss.item())
        return loss

    with accelerator.accumulate(model):
        assert optimizer.step(closure).item() == calls[0]
    assert len(calls) > 1
    assert min(calls) < 1e-6
