"""A model built in half precision trains in fp32 under a mixed precision, whatever the backend."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Backend, Bundle, Run, load_backend
from accel_precision import PrecisionPolicy
from accel_state import Session


def built(dtype: torch.dtype, values: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype).to(values)
    model[0].weight.requires_grad_(False)
    return model


def train(backend: Backend, model: nn.Module) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    for step in range(5):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        backend.backward(model(batch.to(next(model.parameters()).dtype)).float().square().mean())
        backend.step(optimizer)
        optimizer.zero_grad()
    state: Any = backend.states.full_model(model, main_only=False)
    return {name: value.clone() for name, value in state.items()}, optimizer


def check(name: str) -> None:
    session = Session.open(cpu=True)
    policy = PrecisionPolicy.parse("bf16", device_type="cpu")
    state, optimizer = train(load_backend(name)(Run(session, policy)), built(torch.bfloat16, torch.bfloat16))
    assert state["0.weight"].dtype == (torch.float32 if name == "fsdp1" else torch.bfloat16)  # does not train
    assert {state[key].dtype for key in ("0.bias", "2.weight", "2.bias")} == {torch.float32}
    assert {value.dtype for held in optimizer.state.values() for value in held.values()} <= {torch.float32}
    expected, _ = train(load_backend(name)(Run(session, policy)), built(torch.bfloat16, torch.float32))
    for key in ("0.bias", "2.weight", "2.bias"):
        torch.testing.assert_close(state[key], expected[key], rtol=1e-2, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp1"])
def test_an_optimizer_that_has_stepped_on_halves_goes_on_in_fp32(name: str) -> None:
    backend = load_backend(name)(Run(Session.open(cpu=True), PrecisionPolicy.parse("bf16", device_type="cpu")))
    model = built(torch.bfloat16, torch.bfloat16).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    prepared = backend.prepare(Bundle([model], [optimizer])).models[0]
    backend.backward(prepared(torch.ones(2, 8)).float().sum())
    backend.step(optimizer)
    assert {value.dtype for held in optimizer.state.values() for value in held.values()} == {torch.float32}
    assert all(held["step"] == 2 for held in optimizer.state.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp1"])
@pytest.mark.sampled(1)
def test_a_model_built_in_bf16_has_fp32_masters(name: str) -> None:
    check(name)


@pytest.mark.ranks(1)
def test_a_model_built_in_bf16_has_fp32_masters_on_one_process() -> None:
    check("single")
