"""Loops of contracts with one model and one optimizer, as users write them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from accel_testing.contracts.driver import Driver
from accel_testing.contracts.models import HIDDEN, Stack
from accel_testing.contracts.samples import SampleBatch

#: Training loop; returns the prepared model or models whose states are compared.
Train = Callable[..., nn.Module | tuple[nn.Module, ...]]
Loss = Callable[[nn.Module, SampleBatch], Tensor]
#: The forwards and backwards of one micro-batch.
Backward = Callable[[Driver, nn.Module, SampleBatch], None]
Change = Callable[[Driver, nn.Module, Any], None]
Edit = Callable[[Driver, nn.Module], object]


def momentum(model: nn.Module) -> Optimizer:
    """SGD with momentum over all parameters, frozen ones (without gradients) included, as users often write it."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def trainable(model: nn.Module) -> Optimizer:
    """SGD with momentum over the parameters that are not frozen."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def error(model: nn.Module, batch: SampleBatch) -> Tensor:
    """Mean squared error of the model's output for ``x``."""
    return nn.functional.mse_loss(model(batch.x), batch.y)


def routed_error(model: nn.Module, batch: SampleBatch) -> Tensor:
    """Like ``error``, for a model that takes routes."""
    return nn.functional.mse_loss(model(batch.x, batch.route), batch.y)


def token_error(model: nn.Module, batch: SampleBatch) -> Tensor:
    """Like ``error``, for a model that takes tokens."""
    return nn.functional.mse_loss(model(batch.tokens), batch.y)


def next_token(model: nn.Module, batch: SampleBatch) -> Tensor:
    """Cross entropy of each token after the first."""
    return nn.functional.cross_entropy(model(batch.tokens[:, :-1]).flatten(0, 1), batch.tokens[:, 1:].flatten())


def two_forwards(model: nn.Module, batch: SampleBatch) -> Tensor:
    """One loss of two forwards, as contrastive losses have."""
    apart: Tensor = model(batch.x) - model(-batch.x)
    return error(model, batch) + apart.square().mean()


def gradient_penalty(model: nn.Module, batch: SampleBatch) -> Tensor:
    """An error plus the norm of the output's gradient, which the backward differentiates a second time."""
    x = batch.x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return nn.functional.mse_loss(output, batch.y) + slope.square().sum(1).mean()


def own_target(model: nn.Module, batch: SampleBatch) -> Tensor:
    """An error against targets that the same model computed before under ``no_grad``."""
    with torch.no_grad():
        target = model(-batch.x)
    away: Tensor = model(batch.x) - 0.5 * target - batch.y
    return away.square().mean()


def halved_in_place(model: nn.Module, batch: SampleBatch) -> Tensor:
    """A loss with a hook that modifies its gradient in place."""
    loss = error(model, batch)
    loss.register_hook(lambda gradient: gradient.mul_(0.5))
    return loss


def evaluated_between(model: nn.Module, batch: SampleBatch) -> Tensor:
    """A loss, with an evaluation of the model before it."""
    model.eval()
    with torch.no_grad():
        model(batch.x)
    model.train()
    return error(model, batch)


def backward_of_loss(driver: Driver, model: nn.Module, batch: SampleBatch, *, loss: Loss = error) -> None:
    """Forward, loss and backward of a micro-batch."""
    driver.backward(loss(model, batch))


def train(
    driver: Driver,
    model: nn.Module,
    *,
    backward: Backward = backward_of_loss,
    optimizer: Callable[[nn.Module], Optimizer] = momentum,
    scheduler: Callable[[Optimizer], Any] | None = None,
    change: Change | None = None,
    edit: Edit | None = None,
    set_to_none: bool = True,
) -> nn.Module:
    """The ordinary loop.

    ``change`` is called before each micro-batch (with the prepared model and optimizer), ``edit`` between backward and
    step.
    """
    built = optimizer(model)
    scheduled = scheduler(built) if scheduler else None
    model, built, *rest = driver.prepare(model, built, *([scheduled] if scheduled else []))
    for batch in driver.batches():
        if change is not None:
            change(driver, model, built)
        with driver.accumulate(model):
            backward(driver, model, batch)
            if edit is not None:
                edit(driver, model)
            built.step()
            for one in rest:
                one.step()
            built.zero_grad(set_to_none=set_to_none)
    return model


def with_loss(loss: Loss, **options: Any) -> Train:
    """The ordinary loop with another loss."""
    return partial(train, backward=partial(backward_of_loss, loss=loss), **options)


def thaw(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Unfreezes the first block after two steps."""
    if driver.step == 2:
        driver.unwrap_model(model).blocks[0].requires_grad_(True)  # type: ignore[index]


def thaw_after_evaluation(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Unfreezes all parameters after two steps, right after an evaluation, and halves those that were frozen."""
    if driver.step == 2:
        with torch.no_grad():
            model(driver.samples.x[:1])
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.requires_grad_(True).mul_(0.5)


def halve_after_evaluation(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Halves all weights after two steps, right after an evaluation."""
    if driver.step == 2:
        with torch.no_grad():
            model(driver.samples.x[:1])
            for parameter in model.parameters():
                parameter.mul_(0.5)


def freeze(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Freezes the first block after two steps."""
    if driver.step == 2:
        driver.unwrap_model(model).blocks[0].requires_grad_(False)  # type: ignore[index]


def grow(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Adds a layer, and its parameters to the optimizer, after two steps."""
    inner = driver.unwrap_model(model)
    if driver.step == 2 and not hasattr(inner, "grown"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(driver.process_index)
            inner.grown = nn.Linear(HIDDEN, HIDDEN, dtype=driver.dtype)
        optimizer.add_param_group({"params": list(inner.grown.parameters())})


def clip_norm(driver: Driver, model: nn.Module) -> None:
    """Clips gradients by norm."""
    driver.clip_grad_norm_(model.parameters(), 0.3)


def look_ahead(driver: Driver, model: nn.Module) -> None:
    """A forward whose loss is only looked at."""
    model(driver.samples.x[:1])


def clip_value(driver: Driver, model: nn.Module) -> None:
    """Clips gradients by value."""
    driver.clip_grad_value_(model.parameters(), 0.02)


def edit_gradients(driver: Driver, model: nn.Module) -> None:
    """Halves all gradients by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def weighted(driver: Driver, model: nn.Module, *, routed: bool = False) -> nn.Module:
    """Sums losses over the counted samples, whose number is the weight; ``routed``: over those of the first route."""

    def backward(driver: Driver, model: nn.Module, batch: SampleBatch) -> None:
        backward_weighted(driver, model, batch, (batch.route == 0).to(batch.x) if routed else batch.counted)

    return train(driver, model, backward=backward)


def backward_weighted(driver: Driver, model: nn.Module, batch: SampleBatch, counted: Tensor) -> None:
    """Backward of a sum over samples, with the number of counted samples as its weight."""
    summed = ((model(batch.x) - batch.y).square().mean(1) * counted).sum()
    driver.backward(summed, weight=counted.sum())


def skipped(driver: Driver, model: nn.Module, *, weigh: bool = False, edit: Edit | None = None) -> nn.Module:
    """Leaves out the backward of micro-batches that have no sample of the first route, as loops do for bad samples."""

    def backward(driver: Driver, model: nn.Module, batch: SampleBatch) -> None:
        counted = (batch.route == 0).to(batch.x)
        if not counted.any():
            return
        if weigh:
            backward_weighted(driver, model, batch, counted)
        else:
            driver.backward(((model(batch.x) - batch.y).square().mean(1) * counted).mean())

    return train(driver, model, backward=backward, edit=edit)


def cleared_first(driver: Driver, model: nn.Module, *, drop: bool = False) -> nn.Module:
    """Clears gradients at the beginning of each micro-batch, not after the step.

    ``drop``: micro-batches with a sample of the second route have neither backward nor step after that.
    """
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():
        with driver.accumulate(model):
            built.zero_grad()
            if drop and (batch.route == 1).any():
                continue
            driver.backward(error(model, batch))
            built.step()
    return model


def two_backwards(driver: Driver, model: nn.Module) -> nn.Module:
    """Two losses of one forward, each with its own backward."""

    def backward(driver: Driver, model: nn.Module, batch: SampleBatch) -> None:
        output = model(batch.x)
        driver.backward(nn.functional.mse_loss(output, batch.y), retain_graph=True)
        driver.backward(output.square().mean())

    return train(driver, model, backward=backward)


def backward_by_hand(driver: Driver, model: nn.Module) -> nn.Module:
    """Calls ``loss.backward()`` instead of ``accelerator.backward(loss)``."""
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():
        error(model, batch).backward()
        built.step()
        built.zero_grad()
    return model


def windows_by_hand(driver: Driver, model: nn.Module, *, trigger: bool = False) -> nn.Module:
    """Windows counted by the loop: ``no_sync`` for all but the last micro-batch, or a triggered last backward."""
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for window in driver.windows():
        if trigger:
            with driver.no_sync(model):
                losses = [error(model, batch) / len(window) for batch in window]
            for loss in losses[:-1]:
                driver.backward(loss)
            with driver.trigger_sync_in_backward(model):
                driver.backward(losses[-1])
        else:
            for index, batch in enumerate(window):
                with nullcontext() if index == len(window) - 1 else driver.no_sync(model):
                    driver.backward(error(model, batch) / len(window))
        built.step()
        built.zero_grad()
    return model


def closures(driver: Driver, model: nn.Module) -> nn.Module:
    """An optimizer that evaluates a closure several times a step."""
    built: Any = LBFGS(model.parameters(), lr=0.1, max_iter=3)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():

        def closure(batch: SampleBatch = batch) -> Tensor:
            built.zero_grad()
            loss = error(model, batch)
            driver.backward(loss)
            return driver.mean(loss)

        built.step(closure)
    return model


def sharpness_aware(driver: Driver, model: nn.Module) -> nn.Module:
    """Sharpness-aware minimization: each step uses the gradient at a point uphill of the weights."""
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():
        driver.backward(error(model, batch))
        norm = driver.clip_grad_norm_(model.parameters(), float("inf"))
        uphill = []
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    uphill.append((parameter, parameter.grad * (0.5 / float(norm))))
                    parameter.add_(uphill[-1][1])
        built.zero_grad()
        driver.backward(error(model, batch))
        with torch.no_grad():
            for parameter, way in uphill:
                parameter.sub_(way)
        built.step()
        built.zero_grad()
    return model


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def parameter_hooks(driver: Driver, model: nn.Module, *, accumulated: bool = False) -> nn.Module:
    """Hooks on the parameters of the bare model that halve gradients, before or after their accumulation."""
    for parameter in model.parameters():
        if accumulated:
            parameter.register_post_accumulate_grad_hook(_halve)
        else:
            parameter.register_hook(lambda gradient: gradient * 0.5)
    return train(driver, model)


def module_hooks(driver: Driver, model: nn.Module) -> nn.Module:
    """Hooks on modules of the bare model that change inputs, outputs and gradients."""
    first, second = model.blocks  # type: ignore[misc]
    first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    first.register_forward_hook(lambda module, inputs, output: output * 1.5)
    second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return train(driver, model)


def other_weights(driver: Driver, model: nn.Module) -> nn.Module:
    """Ranks start from weights other than the main process's, which all ranks have after ``prepare``."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(driver.process_index)
    return train(driver, model)


def other_model(driver: Driver, model: nn.Module) -> nn.Module:
    """One rank has a model with an additional layer."""
    if driver.process_index == 1:
        model.grown = nn.Linear(HIDDEN, HIDDEN, dtype=driver.dtype)
    return train(driver, model)


def method_error(model: nn.Module, batch: SampleBatch) -> Tensor:
    """A loss of a method of the model other than its forward."""
    hidden: Tensor = model.hidden(batch.x)  # type: ignore[operator]
    return hidden.square().mean()


def method_call(driver: Driver, model: nn.Module) -> nn.Module:
    """Calls a method of the unwrapped model instead of its forward."""

    def backward(driver: Driver, model: nn.Module, batch: SampleBatch) -> None:
        driver.backward(method_error(driver.unwrap_model(model), batch))

    return train(driver, model, backward=backward)


def clamp(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Clamps the weights themselves."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.15, 0.15)


def lower_rate(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Writes another learning rate into the optimizer after two steps."""
    if driver.step == 2:
        for group in optimizer.param_groups:
            group["lr"] = 0.01


def load(driver: Driver, model: nn.Module, optimizer: Any) -> None:
    """Loads weights into the prepared model before the first step."""
    if driver.step == 0:
        inner = driver.unwrap_model(model)
        generator = torch.Generator().manual_seed(5)
        shapes = {name: value.shape for name, value in Stack().state_dict().items()}
        inner.load_state_dict(
            {name: torch.randn(shape, generator=generator).to(driver.dtype) for name, shape in shapes.items()}
        )


def left_out(driver: Driver, model: nn.Module, *, weigh: bool = False) -> nn.Module:
    """Drops the gradients of the second batch, as loops do when a loss is not finite."""
    built = momentum(model)
    model, built = driver.prepare(model, built)
    for batch in driver.batches():
        if weigh:
            backward_weighted(driver, model, batch, batch.counted)
        else:
            driver.backward(error(model, batch))
        if driver.step != 1:
            built.step()
        built.zero_grad()
    return model
