"""Sharded over ranks, a model trains as it does on one."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDPBackend, FSDPConfig
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_testing.models import make_model

STEPS, BATCH, LENGTH = 4, 8, 6


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).double(), batch.roll(1, 1).flatten())


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def reference(kind: str = "adamw", steps: int = STEPS, clip: float | None = None) -> nn.Module:
    model = make_model("transformer", dtype=torch.float64)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        loss_of(model, tokens(step)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def open_backend(precision: str = "no", **options: Any) -> FSDPBackend:
    session = Session.open(cpu=True)
    return FSDPBackend(session, PrecisionPolicy.parse(precision, device_type="cpu"), FSDPConfig(**options))


def train(
    backend: FSDPBackend,
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = STEPS,
    micro: int = 1,
    clip: float | None = None,
) -> None:
    rank, world = backend.session.rank, backend.session.world_size
    for step in range(steps):
        parts = tokens(step).chunk(world * micro)
        for index in range(micro):
            mine = parts[index * world + rank]
            if index < micro - 1:
                with backend.no_sync(model):
                    backend.backward(loss_of(model, mine), scale=1 / micro)
            else:
                backend.backward(loss_of(model, mine), scale=1 / micro)
        if clip is not None:
            backend.clip_grad_norm(model.parameters(), clip)
        backend.step(optimizer)
        optimizer.zero_grad()


def assert_trained(backend: FSDPBackend, model: nn.Module, expected: nn.Module, rtol: float = 1e-10) -> None:
    state = backend.whole_model_state(model, main_only=False)
    for name, value in expected.named_parameters():
        distance = float((state[name] - value.detach()).abs().max() / value.detach().abs().max())
        assert distance <= rtol, f"{name} is {distance:.1e} away"


SHARDINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "none": {"sharding_strategy": "NO_SHARD"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "hybrid2": {"sharding_strategy": 5, "replicate_size": 2},
    "reshard to 2": {"reshard_after_forward": 2},
    "one unit": {"auto_wrap_policy": "NO_WRAP"},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", list(SHARDINGS.values()), ids=list(SHARDINGS))
def test_every_sharding_trains_as_one_process(rank: int, options: dict[str, Any]) -> None:
    backend = open_backend(**options)
    model = make_model("transformer", dtype=torch.float64, seed=rank)  # ranks take rank 0's values
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    bundle = backend.prepare(Bundle([model], [optimizer]))
    assert bundle.models[0] is model
    train(backend, model, optimizer, micro=2, clip=0.5)
    assert_trained(backend, model, reference(clip=0.5))
    backend.close()
