"""torch's optimizers on shards: each steps as on full parameters, or is refused when it is prepared."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDPConfig, Run, load_backend
from accel_precision import PrecisionPolicy
from accel_state import PrepareError, Session

STEPS = 3


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, backward: Any, step: Any, *, part: slice) -> None:
    def closure(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        backward(loss)
        return loss

    for number in range(STEPS):
        step(optimizer, partial(closure, batch(number)[part]))


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    return optimizer


def prepared(version: int, kind: str) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    config = FSDPConfig(fsdp_version=version)
    backend = load_backend(config.backend)(Run(Session.open(cpu=True), PrecisionPolicy.parse("no")), config)
    model = matrices()
    optimizer = made(kind, model)
    return backend, backend.prepare(Bundle([model], [optimizer])).models[0], optimizer


ALIKE = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("version", "kind"), [*((version, kind) for version in (2, 1) for kind in ALIKE), (2, "LBFGS"), (1, "Rprop")]
)
@pytest.mark.sampled(6)
def test_an_optimizer_steps_on_shards_as_on_full_parameters(rank: int, version: int, kind: str) -> None:
    expected = matrices()
    stepping = made(kind, expected)
    train(expected, stepping, torch.Tensor.backward, lambda one, closure: one.step(closure), part=slice(None))
    backend, model, optimizer = prepared(version, kind)
    train(model, optimizer, backend.backward, backend.step, part=slice(4 * rank, 4 * rank + 4))
    state = backend.states.full_model(model, main_only=False)
    for name, value in expected.named_parameters():
        assert float((state[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("version", "kind", "nearest"),
    [
        (2, "Adafactor", r"nearest: AdamW, or strategy='ddp'"),
        (2, "Rprop", r"nearest: AdamW, or fsdp_version=1, or strategy='ddp'"),
        (1, "Adafactor", r"nearest: AdamW, or strategy='ddp'"),
        (1, "LBFGS", r"nearest: AdamW, or fsdp_version=2, or strategy='ddp'"),
        (1, "Muon", r"nearest: AdamW, or fsdp_version=2, or strategy='ddp'"),
    ],
)
def test_one_that_needs_full_parameters_is_refused(version: int, kind: str, nearest: str) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    with pytest.raises(PrepareError, match=rf"{kind} looks at full parameters, .*fsdp_version={version}.*{nearest}"):
        prepared(version, kind)


@pytest.mark.ranks(2)
def test_one_that_updates_nothing_sharded_is_none_of_the_backends_business() -> None:
    config = FSDPConfig(ignored_modules="2")
    backend = load_backend(config.backend)(Run(Session.open(cpu=True), PrecisionPolicy.parse("no")), config)
    model = matrices()
    optimizer = torch.optim.Adafactor(model.get_submodule("2").parameters())
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    backend.backward(model(batch(0)).square().mean())
    assert backend.step(optimizer)


@pytest.mark.ranks(2)
def test_what_the_user_has_sharded_is_looked_at_as_well() -> None:
    from torch.distributed.fsdp import fully_shard

    model = matrices()
    fully_shard(model)
    backend = load_backend("fsdp")(Run(Session.open(cpu=True), PrecisionPolicy.parse("no")), FSDPConfig())
    with pytest.raises(PrepareError, match="Adafactor looks at full parameters"):
        backend.prepare(Bundle([model], [made("Adafactor", model)]))
