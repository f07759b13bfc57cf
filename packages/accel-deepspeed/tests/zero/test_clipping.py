"""Gradients of an engine clipped to any norm, all of them or some, as one process clips them."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.errors import BackendError

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

PLACES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")]
NORMS = [0.5, 1.0, 2.0, 3.0, math.inf]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """The last layer in a group of its own."""
    groups = [{"params": [*model[0].parameters(), *model[2].parameters()]}, {"params": model[4].parameters()}]  # type: ignore[index]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: torch.Tensor = (3 * model(torch.randn(4, 5, generator=generator)) + 1).pow(2).mean()
    return loss


@dataclass(frozen=True)
class Side:
    """One way of training: the parameters of a layer, and the two clips."""

    layers: Callable[..., list[nn.Parameter]]
    norm: Callable[..., torch.Tensor]
    value: Callable[..., None]


@contextmanager
def opened(stage: int, device: str = "none", precision: str = "no", **options: Any) -> Iterator[Any]:
    zero = {"stage": stage, **({} if device == "none" else {"offload_optimizer": {"device": device}})}
    document = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **options}
    with Session.open(cpu=True) as session:
        policy = PrecisionPolicy.parse(precision, device_type="cpu")
        backend = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin.build({"hf_ds_config": document}))
        try:
            yield backend
        finally:
            backend.close()


def layers_of(model: nn.Module) -> Callable[..., list[nn.Parameter]]:
    return lambda *numbers: [p for number in numbers or (0, 2, 4) for p in model[number].parameters()]  # type: ignore[index]


def assert_clipped_as_one_process(
    stage: int, device: str, clip: Callable[[Side], Iterable[torch.Tensor]], *, rank: int
) -> None:
    """Three steps of windows of two, clipped by ``clip``: the norms and the weights are those of one process."""
    reference, model = make_net(), make_net()
    plain = momentum(reference)
    with opened(stage, device) as backend:
        bundle = backend.prepare(Bundle([model], [momentum(model)]))
        engine, optimizer = bundle.models[0], bundle.optimizers[0]
        one = Side(layers_of(reference), clip_grad_norm_, clip_grad_value_)
        spread = Side(layers_of(engine.module), backend.gradients.clip_norm, backend.gradients.clip_value)
        for step in range(3):
            for micro in range(2):
                backend.backward(loss_of(engine, rank, 2 * step + micro))
                (sum(loss_of(reference, each, 2 * step + micro) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            for found, expected in zip(clip(spread), clip(one), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
            assert backend.step(optimizer)
            plain.step()
            plain.zero_grad()
        state = backend.states.full_model(engine, main_only=False)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norm_type", "stage", "device"),
    [  # by default each norm at half of the places, and each place with half of the norms
        pytest.param(norm_type, *place, marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, norm_type in enumerate(NORMS)
        for column, place in enumerate(PLACES)
    ],
)
@pytest.mark.sampled(5)
def test_any_norm_clips(rank: int, stage: int, device: str, norm_type: float) -> None:
    assert_clipped_as_one_process(stage, device, lambda side: [side.norm(side.layers(), 0.3, norm_type)], rank=rank)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(("stage", "device"), PLACES)
@pytest.mark.sampled(4)
def test_some_of_the_parameters_are_clipped(rank: int, stage: int, device: str, norm_type: float) -> None:
    """Each layer to a norm of its own, the middle one not at all."""
    assert_clipped_as_one_process(
        stage,
        device,
        lambda side: [side.norm(side.layers(0), 0.1, norm_type), side.norm(side.layers(4), 0.2, norm_type)],
        rank=rank,
    )


def norm_then_part(side: Side) -> list[torch.Tensor]:
    return [side.norm(side.layers(), 0.3), side.norm(side.layers(2), 0.05)]


def part_then_norm(side: Side) -> list[torch.Tensor]:
    return [side.norm(side.layers(2), 0.05), side.norm(side.layers(), 0.3)]


def norm_then_value(side: Side) -> list[torch.Tensor]:
    norm = side.norm(side.layers(), 0.3)
    side.value(side.layers(), 0.05)
    return [norm]


def value_of_a_part(side: Side) -> list[torch.Tensor]:
    side.value(side.layers(0), 0.01)
    return [side.norm(side.layers(), math.inf)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip", [norm_then_part, part_then_norm, norm_then_value, value_of_a_part])
@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_clips_follow_each_other(
    rank: int, stage: int, device: str, clip: Callable[[Side], Iterable[torch.Tensor]]
) -> None:
    assert_clipped_as_one_process(stage, device, clip, rank=rank)


@pytest.mark.parametrize("layers", [(), (0, 4)])
@pytest.mark.parametrize(("stage", "device"), PLACES)
@pytest.mark.sampled(4)
def test_gradients_that_are_added_after_a_clip_are_not_clipped(
    rank: int, stage: int, device: str, layers: tuple[int, ...]
) -> None:
    reference, model = make_net(), make_net()
    plain = momentum(reference)
    with opened(stage, device) as backend:
        bundle = backend.prepare(Bundle([model], [momentum(model)]))
        engine = bundle.models[0]
        for step in range(2):
            backend.backward(loss_of(engine, rank, step))
            (sum(loss_of(reference, each, step) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            if step == 0:
                backend.gradients.clip_norm(layers_of(engine.module)(*layers), 0.1)
                clip_grad_norm_(layers_of(reference)(*layers), 0.1)
        assert backend.step(bundle.optimizers[0])
        plain.step()
        state = backend.states.full_model(engine, main_only=False)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_16_bits_are_added_to_clipped_ones_in_host_memory(rank: int, stage: int) -> None:
    with opened(stage, "cpu", precision="bf16") as backend:
        model = make_net()
        engine = backend.prepare(Bundle([model], [momentum(model)])).models[0]
        backend.backward(loss_of(engine, rank, 0))
        first = backend.gradients.full(engine)
        backend.gradients.clip_norm(layers_of(engine.module)(0, 4), 0.1)
        clipped = backend.gradients.full(engine)
        assert clipped["0.weight"].norm() < 0.5 * first["0.weight"].norm()
        backend.backward(loss_of(engine, rank, 0))  # the same gradient again
        for name, both in backend.gradients.full(engine).items():
            torch.testing.assert_close(both, clipped[name] + first[name])


@pytest.mark.parametrize("spoilt", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_norm_that_is_not_finite_on_one_rank_is_infinite_on_both(rank: int, stage: int, spoilt: float) -> None:
    with opened(stage) as backend:
        model = make_net()
        bundle = backend.prepare(Bundle([model], [momentum(model)]))
        engine = bundle.models[0]
        backend.backward(loss_of(engine, rank, 0) * (spoilt if rank else 1.0))
        with pytest.raises(BackendError, match="error_if_nonfinite"):
            backend.gradients.clip_norm(engine.parameters(), 1.0, 1.0, error_if_nonfinite=True)
        assert backend.gradients.clip_norm(engine.module[0].parameters(), math.inf).item() == math.inf


def test_a_clip_beside_that_of_the_configuration_is_refused(rank: int) -> None:
    with opened(2, gradient_clipping=1.0) as backend:
        model = make_net()
        engine = backend.prepare(Bundle([model], [momentum(model)])).models[0]
        backend.backward(loss_of(engine, rank, 0))
        for parameters, norm_type in ((engine.parameters(), 1.0), (engine.module[0].parameters(), 2.0)):
            with pytest.raises(BackendError, match=r"gradient_clipping is 1\.0"):
                backend.gradients.clip_norm(parameters, 1.0, norm_type)
            backend.gradients.clip_norm(engine.parameters(), math.inf, norm_type)


@pytest.mark.parametrize(("what", "words"), [("clip_norm", "norm_type is -1"), ("clip_value", "is -1")])
def test_limits_that_cannot_be_are_refused(rank: int, what: str, words: str) -> None:
    with opened(1) as backend:
        model = make_net()
        engine = backend.prepare(Bundle([model], [momentum(model)])).models[0]
        given = (1.0, -1.0) if what == "clip_norm" else (-1.0,)
        with pytest.raises(BackendError, match=words):
            getattr(backend.gradients, what)(engine.parameters(), *given)
