"""A batch whose gradients are cleared without a step leaves no trace in the steps after it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DataLoaderConfiguration, GradScalerKwargs
from accel_precision import PrecisionError
from accel_state.errors import BackendError

CLEARING: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
}


def prepared(strategy: str | None = None, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def in_fp16(strategy: str | None = None) -> tuple[Accelerator, Any, Any]:
    return prepared(strategy, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])


def norm_after_dropping(accelerator: Accelerator, model: Any, clear: Callable[[], None]) -> tuple[float, float]:
    """The norm of a batch's gradient, before and after the same batch was clipped and dropped."""
    x = torch.ones(2, 4)
    norms = []
    for _ in range(2):
        accelerator.backward(model(x).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        clear()
    return norms[0], norms[1]


@pytest.mark.parametrize("how", CLEARING)
def test_the_loss_scale_is_taken_out_of_the_gradients_after_a_dropped_batch(how: str) -> None:
    accelerator, model, optimizer = in_fp16()
    first, second = norm_after_dropping(accelerator, model, lambda: CLEARING[how](model, optimizer))
    assert second == pytest.approx(first, rel=1e-3)
    assert accelerator.scaler.current == 1024.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_loss_scale_is_taken_out_after_a_dropped_batch_on_ranks(strategy: str) -> None:
    accelerator, model, optimizer = in_fp16(strategy)
    first, second = norm_after_dropping(accelerator, model, optimizer.zero_grad)
    assert second == pytest.approx(first, rel=1e-3)
    accelerator.end_training()


@pytest.mark.parametrize("how", CLEARING)
def test_batches_dropped_for_their_overflow_lower_the_loss_scale(how: str) -> None:
    """A loop that looks at the norm itself would otherwise drop every batch from there on."""
    accelerator, model, optimizer = in_fp16()
    for expected in (1024.0, 512.0, 256.0):
        accelerator.backward(model(torch.ones(2, 4)).square().mean() * 1e38)
        assert accelerator.scaler.current == expected
        assert not math.isfinite(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        CLEARING[how](model, optimizer)


def test_a_backward_after_clipping_is_refused_because_it_would_add_scaled_gradients_to_unscaled_ones() -> None:
    accelerator, model, _ = in_fp16()
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PrecisionError, match=r"to those of SGD.*clip after the last backward"):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())


def test_the_backward_of_one_model_leaves_the_clipped_gradients_of_another_unscaled() -> None:
    options = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[options])
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *steps = accelerator.prepare(*models, *optimizers)
    accelerator.backward(first(torch.ones(2, 2)).sum())
    accelerator.clip_grad_norm_(first.parameters(), 100.0)
    held = first.weight.grad.clone()
    accelerator.backward(second(torch.ones(2, 2)).sum())
    before = first.weight.detach().clone()
    for optimizer in steps:
        optimizer.step()
    torch.testing.assert_close(first.weight.detach(), before - 0.1 * held)


@pytest.mark.parametrize("how", CLEARING)
def test_the_weight_of_a_dropped_batch_is_none_of_the_next_steps(how: str) -> None:
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(torch.ones(30, 4)).sum(), weight=30)
    CLEARING[how](model, optimizer)
    accelerator.backward(model(torch.ones(3, 4)).sum(), weight=3)
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(model(torch.ones(3, 4)).sum() / 3, list(model.parameters()))
    torch.testing.assert_close(found, list(expected))


def test_the_weights_of_two_losses_of_one_step_add_up_although_gradients_were_cleared_before() -> None:
    accelerator, model, optimizer = prepared()
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(30, 4)).sum(), weight=30)
    accelerator.backward(model(torch.ones(3, 4)).sum(), weight=3)
    expected = torch.autograd.grad(model(torch.ones(33, 4)).sum() / 33, list(model.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_gradients_of_a_loss_that_was_not_scaled_are_refused(first: bool, clipped: bool) -> None:
    accelerator, model, optimizer = in_fp16()
    x = torch.ones(2, 4)
    if not first:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model(x).square().mean().backward()
    use = partial(accelerator.clip_grad_norm_, model.parameters(), 1.0) if clipped else optimizer.step
    with pytest.raises(BackendError, match=r"SGD \(0.weight, 0.bias, 2.weight and 1 more\).*accelerator.backward"):
        use()


def test_a_loss_scaled_by_hand_steps() -> None:
    accelerator, model, optimizer = in_fp16()
    before = model[0].weight.detach().clone()
    accelerator.scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach(), before)


def test_a_closure_that_goes_backward_steps_in_fp16() -> None:
    accelerator, model, optimizer = in_fp16()
    before = model[0].weight.detach().clone()
    optimizer.step(lambda: accelerator.backward(model(torch.ones(2, 4)).square().mean()))
    assert not torch.equal(model[0].weight.detach(), before)


def test_the_scaler_has_the_names_that_torch_gives_them() -> None:
    accelerator, model, optimizer = in_fp16()
    assert accelerator.scaler.is_enabled()
    assert accelerator.scaler.get_scale() == 1024.0
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    accelerator.scaler.unscale_(optimizer)
    held = model[0].weight.grad.clone()
    before = model[0].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * held)


READS: dict[str, Callable[[Accelerator, nn.Module], Any]] = {
    "norm": lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), math.inf),
    "full": lambda accelerator, model: accelerator.full_gradients(model)["weight"].norm(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_window_resumed_before_a_batch_without_backward_has_the_gradients_of_all_ranks(
    rank: int, strategy: str, tmp_path: Any
) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder = accelerator.save_state(tmp_path / "shared")
    for resumed in (False, True):
        for read in READS.values():
            accelerator.load_state(folder)
            with accelerator.accumulate(model):
                rows = torch.tensor([[1.0, 0.0, 4.0 * rank]], dtype=torch.float64)
                accelerator.backward(model(rows).sum())
            if resumed:
                accelerator.save_state(tmp_path / "open")
                accelerator.load_state(tmp_path / "open")
            with accelerator.accumulate(model):
                # the mean over ranks of (1, 0, 0) and (1, 0, 4), over two micro-batches
                assert float(read(accelerator, model)) == pytest.approx(math.hypot(0.5, 1.0), rel=1e-12)
                optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_ranks_that_may_have_left_the_loop_reduce_no_window_without_its_last_backward() -> None:
    loading = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
        with accelerator.accumulate(model), pytest.raises(BackendError, match="had no backward, and within join"):
            optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
