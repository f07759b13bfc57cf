"""State dicts of engines: models with hooks of their own, and parameter groups that have not trained yet."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run, load_backend
from accel_backends.ops.state_dicts import optimizer_state
from accel_deepspeed import DeepSpeedPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Renames the weight, and adds an entry of its own."""
    state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")
    state[f"{prefix}added"] = torch.ones(2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_that_a_hook_renames_is_saved_in_full_under_its_own_name(
    rank: int, world_size: int, stage: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    model[0].register_state_dict_post_hook(rename)
    with Session.open(cpu=True) as session:
        policy = PrecisionPolicy.parse("bf16", device_type="cpu")
        backend = load_backend("deepspeed")(Run(session, policy), DeepSpeedPlugin.build({"zero_stage": stage}))
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = backend.prepare(Bundle([model], [optimizer], [])).models[0]
            state = backend.states.full_model(engine, main_only=False)
            backend.states.load_model(engine, state)
            again = backend.states.full_model(engine, main_only=False)
        finally:
            backend.close()
    assert set(state) == {*expected, "0.added"}
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)  # fp32 master weights, not rounded
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_group_without_a_saved_state_begins_at_its_first_step(rank: int, stage: int) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
        return model, torch.optim.AdamW([{"params": one.parameters()} for one in model], lr=0.1)

    def loss_of(model: Any, count: int) -> torch.Tensor:
        value = torch.ones(2, 3)
        for layer in list(getattr(model, "module", model))[:count]:
            value = layer(value)
        return value.square().mean()

    expected, stepping = made()
    loss_of(expected, 1).backward()
    stepping.step()
    saved, states = expected.state_dict(), optimizer_state(stepping, [expected])
    assert set(states["state"]) == {"0.weight", "0.bias"}
    model, optimizer = made()
    model.load_state_dict(saved)
    with Session.open(cpu=True) as session:
        backend = load_backend("deepspeed")(Run(session, PrecisionPolicy()), DeepSpeedPlugin(zero_stage=stage))
        try:
            bundle = backend.prepare(Bundle([model], [optimizer], []))
            engine = bundle.models[0]
            backend.states.load_optimizer(bundle.optimizers[0], [engine], states)
            engine.module.forward = lambda: loss_of(engine.module, 2)
            for _ in range(2):
                stepping.zero_grad()
                loss_of(expected, 2).backward()
                stepping.step()
                backend.backward(engine())
                backend.step(bundle.optimizers[0])
            found = backend.states.full_model(engine, main_only=False)
            counts = backend.states.optimizer(bundle.optimizers[0], [engine])["state"]
        finally:
            backend.close()
    assert (float(counts["0.bias"]["step"]), float(counts["1.bias"]["step"])) == (3, 2)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_of_an_optimizer_have_missed_no_steps_when_it_is_loaded(rank: int, stage: int) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        model.bias.requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    expected, stepping = made()
    expected(torch.ones(2, 3)).square().mean().backward()
    stepping.step()
    model, optimizer = made()
    model.load_state_dict(expected.state_dict())
    with Session.open(cpu=True) as session:
        backend = load_backend("deepspeed")(Run(session, PrecisionPolicy()), DeepSpeedPlugin(zero_stage=stage))
        try:
            bundle = backend.prepare(Bundle([model], [optimizer], []))
            engine = bundle.models[0]
            backend.states.load_optimizer(bundle.optimizers[0], [engine], optimizer_state(stepping, [expected]))
            backend.backward(engine(torch.ones(2, 3)).square().mean())
            assert backend.step(bundle.optimizers[0])
            found = backend.states.full_model(engine, main_only=False)
        finally:
            backend.close()
    stepping.zero_grad()
    expected(torch.ones(2, 3)).square().mean().backward()
    stepping.step()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
