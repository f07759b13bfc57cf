"""Parameters without a gradient on any rank are left as they are at every stage of ZeRO, as torch leaves them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from accel_backends import Bundle, Run, load_backend
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.errors import BackendError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

CASES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")]
OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "AdamW": {"lr": 0.1}, "NAdam": {"lr": 0.1}}
KINDS: dict[str, type[Optimizer]] = {"SGD": SGD, "AdamW": AdamW, "NAdam": NAdam}
# Which of the parts each rank uses in the steps: the last comes late, the second with pauses, the third never.
USES = [((0, 1), (0, 1)), ((0,), (0,)), ((0,), (1,)), ((0, 3), (0,)), ((0,), (0,)), ((0, 1), (3,))]


class Parts(nn.Module):
    """Layers in a row, of which each call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, use: Sequence[int]) -> torch.Tensor:
        for number in use:
            x = x + torch.tanh(self.parts[number](x))
        result: torch.Tensor = self.head(x)
        return result


def optimizer_of(model: nn.Module, kind: str) -> Optimizer:
    made: Any = KINDS[kind]
    optimizer: Optimizer = made(model.parameters(), **OPTIMIZERS[kind])
    return optimizer


def loss_of(model: nn.Module, rank: int, step: int, use: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: torch.Tensor = model(torch.randn(4, 5, generator=generator), use).pow(2).mean()
    return loss


@contextmanager
def opened(stage: int, where: str, precision: str = "no") -> Iterator[Any]:
    zero: dict[str, Any] = {"stage": stage}
    if where == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    with Session.open(cpu=True) as session:
        options = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        policy = PrecisionPolicy.parse(precision, device_type="cpu")
        backend: Any = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin.build({"hf_ds_config": options}))
        try:
            yield backend
        finally:
            backend.close()


def uses_of(stage: int) -> list[tuple[tuple[int, ...], ...]]:
    """At stage 3 ranks compute the same modules."""
    return [(use[0], use[0]) if stage == 3 else use for use in USES]


def step_plain(model: nn.Module, optimizer: Optimizer, step: int, uses: Sequence[Sequence[int]]) -> None:
    (sum(loss_of(model, rank, step, use) for rank, use in enumerate(uses)) / len(uses)).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def assert_alike(backend: Any, trained: nn.Module, reference: nn.Module) -> None:
    state = backend.states.full_model(trained, main_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(4)
def test_parts_that_no_rank_uses_stay(rank: int, world_size: int, stage: int, where: str, kind: str) -> None:
    reference = Parts()
    plain = optimizer_of(reference, kind)
    with opened(stage, where) as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, kind)]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step, uses in enumerate(uses_of(stage)):
            backend.backward(loss_of(engine, rank, step, uses[rank]))
            backend.step(optimizer)
            step_plain(reference, plain, step, uses)
        assert_alike(backend, engine, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.sampled(1)
def test_counts_of_steps_that_were_missed_are_saved_and_loaded(rank: int, world_size: int, stage: int) -> None:
    reference = Parts()
    plain = optimizer_of(reference, "AdamW")
    uses = uses_of(stage)
    for step in range(4):
        step_plain(reference, plain, step, uses[step])
    with opened(stage, "none") as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "AdamW")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step in range(4):
            backend.backward(loss_of(engine, rank, step, uses[step][rank]))
            backend.step(optimizer)
        model_state = backend.states.full_model(engine, main_only=False)
        state = backend.states.optimizer(optimizer, [engine])
        names = {id(parameter): name for name, parameter in reference.named_parameters()}
        expected = {names[id(parameter)]: float(one["step"]) for parameter, one in plain.state.items()}
        found = {name: float(one["step"]) for name, one in state["state"].items()}
        assert {name: count for name, count in found.items() if count} == expected
    with opened(stage, "none") as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "AdamW")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        backend.states.load_model(engine, model_state)
        backend.states.load_optimizer(optimizer, [engine], state)
        for step in (4, 5):
            backend.backward(loss_of(engine, rank, step, uses[step][rank]))
            backend.step(optimizer)
            step_plain(reference, plain, step, uses[step])
        assert_alike(backend, engine, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_part_that_is_frozen_later_stays_until_it_trains_again(rank: int, world_size: int, stage: int) -> None:
    reference = Parts()
    plain = optimizer_of(reference, "SGD")
    with opened(stage, "none") as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "SGD")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step in range(6):
            for one in (engine.module, reference):
                one.parts[1].requires_grad_(step not in (2, 3))
            backend.backward(loss_of(engine, rank, step, (0, 1)))
            backend.step(optimizer)
            step_plain(reference, plain, step, ((0, 1), (0, 1)))
        assert_alike(backend, engine, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_other_counts_of_an_optimizer_are_refused_when_a_part_comes_back(
    rank: int, world_size: int, stage: int
) -> None:
    with opened(stage, "none") as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "NAdam")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step, use in enumerate(((0, 1), (0,))):
            backend.backward(loss_of(engine, rank, step, use))
            backend.step(optimizer)
        backend.backward(loss_of(engine, rank, 2, (0, 1)))
        with pytest.raises(BackendError, match=r"NAdam keeps mu_product of all parameters together"):
            backend.step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(2)
def test_copies_of_parts_that_no_rank_uses_keep_their_bits(rank: int, world_size: int, stage: int, where: str) -> None:
    with opened(stage, where, "bf16") as backend:
        model = Parts()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "SGD")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step, uses in enumerate(uses_of(stage)):
            backend.backward(loss_of(engine, rank, step, uses[rank]))
            backend.step(optimizer)
        after = backend.states.full_model(engine, main_only=False)
        same = {name for name, value in before.items() if torch.equal(after[name], value)}
        assert same == {"parts.2.weight", "parts.2.bias"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "where"), CASES)
@pytest.mark.sampled(2)
def test_parts_that_no_rank_uses_stay_in_a_window_that_is_resumed(
    rank: int, world_size: int, stage: int, where: str
) -> None:
    reference = Parts()
    plain = optimizer_of(reference, "SGD")
    with opened(stage, where) as backend:
        model = Parts()
        bundle = backend.prepare(Bundle([model], [optimizer_of(model, "SGD")]))
        (engine,), (optimizer,) = bundle.models, bundle.optimizers
        for step, use in enumerate(((0, 1), (0,))):
            backend.backward(loss_of(engine, rank, step, use))
            if use == (0,):
                held = {name: value.clone() for name, value in backend.gradients.unreduced(engine).items()}
                assert not [name for name in held if name.startswith("parts.1.")]
                backend.gradients.set_unreduced(engine, held)
            backend.step(optimizer)
            step_plain(reference, plain, step, (use, use))
        assert_alike(backend, engine, reference)
