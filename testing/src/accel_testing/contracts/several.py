"""Loops of contracts with several models or optimizers, copies of a model, and unusual uses of optimizers."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from accel_testing.contracts.driver import Driver
from accel_testing.contracts.loops import error, momentum
from accel_testing.contracts.samples import probe


def two_optimizers(driver: Driver, model: nn.Module) -> nn.Module:
    """One loss, and an optimizer for each half of the model."""
    first: Any = SGD([*model.stem.parameters(), *model.blocks.parameters()], lr=0.05, momentum=0.9)  # type: ignore[union-attr]
    second: Any = torch.optim.AdamW(model.crown.parameters(), lr=0.01)  # type: ignore[union-attr]
    model, first, second = driver.prepare(model, first, second)
    for batch in driver.batches():
        with driver.accumulate(model):
            driver.backward(error(model, batch))
            for one in (first, second):
                one.step()
                one.zero_grad()
    return model


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with weight decay on weights, and none on biases."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], lr=0.01
    )


def blocks_only(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the blocks only; the other parameters have gradients and no optimizer."""
    return SGD(model.blocks.parameters(), lr=0.05, momentum=0.9)  # type: ignore[union-attr]


def _prepared(
    driver: Driver, first: nn.Module, second: nn.Module, ours: Any, theirs: Any, *, apart: bool
) -> tuple[Any, ...]:
    """Prepares both models and their optimizers, in one call or ``apart``."""
    if apart:
        first, ours = driver.prepare(first, ours)
        second, theirs = driver.prepare(second, theirs)
        return first, second, ours, theirs
    return tuple(driver.prepare(first, second, ours, theirs))


def adversaries(
    driver: Driver, generator: nn.Module, critic: nn.Module, *, freeze: bool = False, apart: bool = False
) -> tuple[nn.Module, ...]:
    """Two models, each with its own loss and optimizer (a GAN).

    The generator's loss leaves gradients in the critic, which are cleared before the critic's next loss; with
    ``freeze`` there are none, because the critic is frozen meanwhile. With ``apart`` the models are prepared one after
    the other.
    """
    ours: Any = momentum(generator)
    theirs: Any = momentum(critic)
    generator, critic, ours, theirs = _prepared(driver, generator, critic, ours, theirs, apart=apart)
    for batch in driver.batches():
        with driver.accumulate(critic):
            theirs.zero_grad()
            fake = generator(batch.x).detach()
            driver.backward(critic(fake).square().mean() + (critic(batch.y) - 1).square().mean())
            theirs.step()
            theirs.zero_grad()
        critic.requires_grad_(not freeze)
        with driver.accumulate(generator):
            driver.backward((critic(generator(batch.x)) - 1).square().mean())
            ours.step()
            ours.zero_grad()
        critic.requires_grad_(True)
    return generator, critic


def one_loss_of_two(
    driver: Driver, encoder: nn.Module, decoder: nn.Module, *, apart: bool = False, second: bool = True
) -> tuple[nn.Module, ...]:
    """Two consecutive models under one weighted loss, with an optimizer each.

    Without ``second`` the loop enters ``accumulate`` for the first of them only, though both are trained.
    """
    ours: Any = momentum(encoder)
    theirs: Any = momentum(decoder)
    encoder, decoder, ours, theirs = _prepared(driver, encoder, decoder, ours, theirs, apart=apart)
    for batch in driver.batches():
        with driver.accumulate(encoder, *([decoder] if second else [])):
            summed = ((decoder(encoder(batch.x)) - batch.y).square().mean(1) * batch.counted).sum()
            driver.backward(summed, weight=batch.counted.sum())
            for one in (ours, theirs):
                one.step()
                one.zero_grad()
    return encoder, decoder


def side_by_side(driver: Driver, first: nn.Module, second: nn.Module) -> tuple[nn.Module, ...]:
    """Two independent models in one loop."""
    ours: Any = momentum(first)
    theirs: Any = momentum(second)
    first, second, ours, theirs = _prepared(driver, first, second, ours, theirs, apart=True)
    for batch in driver.batches():
        for model, built in ((first, ours), (second, theirs)):
            with driver.accumulate(model):
                driver.backward(error(model, batch))
                built.step()
                built.zero_grad()
    return first, second


def distilled(driver: Driver, student: nn.Module, teacher: nn.Module, *, apart: bool = False) -> nn.Module:
    """Distillation: a frozen model makes the targets of another."""
    teacher.requires_grad_(False)
    built: Any = momentum(student)
    if apart:
        student, built = driver.prepare(student, built)
        teacher = driver.prepare(teacher)
    else:
        student, teacher, built = driver.prepare(student, teacher, built)
    for batch in driver.batches():
        with driver.accumulate(student):
            with torch.no_grad():
                target = teacher(batch.x)
            driver.backward(nn.functional.mse_loss(student(batch.x), target))
            built.step()
            built.zero_grad()
    return student


def _steps(driver: Driver, model: nn.Module, built: Any) -> Iterator[None]:
    """Trains a prepared model on each micro-batch; yields after each step."""
    for batch in driver.batches():
        with driver.accumulate(model):
            driver.backward(error(model, batch))
            built.step()
            built.zero_grad()
        yield


def copied(driver: Driver, model: nn.Module) -> nn.Module:
    """Exponential moving average of the weights in a copy of the prepared model."""
    built: Any = momentum(model)
    model, built = driver.prepare(model, built)
    mean = deepcopy(model).requires_grad_(False)
    for _ in _steps(driver, model, built):
        with torch.no_grad():
            for average, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.2)
    with torch.no_grad():
        driver.note("output of the copy", mean(probe(driver.dtype)))
    return model


def bare_copy(driver: Driver, model: nn.Module) -> nn.Module:
    """Exponential moving average of the weights on the main process, in a copy of the unprepared model."""
    mean = deepcopy(model).requires_grad_(False)
    built: Any = momentum(model)
    model, built = driver.prepare(model, built)
    for _ in _steps(driver, model, built):
        state = driver.get_state_dict(model)
        for name, average in mean.state_dict().items():
            if name in state:
                average.lerp_(state[name].to(average), 0.2)
    if driver.process_index == 0:
        for name, average in mean.state_dict().items():
            driver.note(f"mean of {name}", average)
    return model


def averaged(driver: Driver, model: nn.Module) -> nn.Module:
    """torch's ``AveragedModel`` of the prepared model."""
    built: Any = momentum(model)
    model, built = driver.prepare(model, built)
    mean = AveragedModel(model)
    for _ in _steps(driver, model, built):
        mean.update_parameters(model)
    with torch.no_grad():
        driver.note("output of the average", mean(probe(driver.dtype)))
    return model


def unprepared_optimizer(driver: Driver, model: nn.Module) -> nn.Module:
    """The model is prepared, its optimizer is not."""
    built = momentum(model)
    model = driver.prepare(model)
    for _ in _steps(driver, model, built):
        pass
    return model


def optimizer_of_prepared(driver: Driver, model: nn.Module) -> nn.Module:
    """The optimizer is made from the prepared model, and prepared after it."""
    model = driver.prepare(model)
    built: Any = driver.prepare(momentum(model))
    for _ in _steps(driver, model, built):
        pass
    return model


def raw_optimizer(driver: Driver, model: nn.Module) -> nn.Module:
    """Both are prepared, but the original optimizer steps instead of the prepared one."""
    built = momentum(model)
    model, _ = driver.prepare(model, built)
    for _ in _steps(driver, model, built):
        pass
    return model
