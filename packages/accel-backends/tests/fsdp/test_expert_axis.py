"""Models with experts that ep_size divides among ranks, sharded over the data-parallel ranks beside."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, Run
from accel_backends.fsdp.backend import FSDPBackend
from accel_backends.fsdp.config import FSDPConfig
from accel_precision.policy import PrecisionPolicy
from accel_state import ParallelismConfig, PrepareError, Session

WIDTH, TOKENS = 8, 16


class Experts(nn.Module):
    """Reference experts: one matrix and one bias each, computed one after the other."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.matrix = nn.Parameter(torch.randn(num_experts, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.bias = nn.Parameter(torch.randn(num_experts, WIDTH))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            computed = torch.tanh(hidden_states[token] @ self.matrix[expert] + self.bias[expert])
            output = output.index_add(0, token, computed * top_k_weights[token, choice, None])
        return output


class Routed(nn.Module):
    """A residual block of experts with the router that chooses two of them for each token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = Experts(num_experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        choices = min(2, self.experts.num_experts)  # a model may count all experts
        weights, index = self.router(hidden).softmax(-1).topk(choices, dim=-1)
        output: torch.Tensor = hidden + self.experts(hidden, index, weights)
        return output


def model_of(num_experts: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [Routed(num_experts) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 1)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def open_backend(precision: str = "no", *, degrees: dict[str, int], **options: Any) -> FSDPBackend:
    session = Session.open(cpu=True)
    parallelism = ParallelismConfig(**degrees).fitted(session.topology.world_size)
    config = FSDPConfig(shard_size=parallelism.dp_shard_size, replicate_size=parallelism.dp_replicate_size, **options)
    return FSDPBackend(Run(session, PrecisionPolicy.parse(precision, device_type="cpu"), parallelism), config)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("num_experts", "shards"), [(4, ((1, 8, 8), (1, 8))), (2, ((1, 4, 8), (1, 4)))])
def test_experts_that_shards_do_not_divide_are_sharded_over_their_rows(
    rank: int, num_experts: int, shards: tuple[tuple[int, ...], ...]
) -> None:
    expected = model_of(num_experts)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        loss_of(expected, batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    backend = open_backend(degrees={"ep_size": 2, "dp_shard_size": 2})
    model = model_of(num_experts, seed=rank)  # ranks take rank 0's values
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backend.prepare(Bundle([model], [optimizer]))
    parameters: Any = dict(model.named_parameters())
    held = (parameters["1.experts.matrix"], parameters["1.experts.bias"])
    assert tuple(tuple(one.to_local().shape) for one in held) == shards
    for step in range(3):
        backend.backward(loss_of(model, batch(step).chunk(4)[rank]))
        assert float(backend.gradients.clip_norm(model.parameters(), 0.1)) == pytest.approx(norms[step], rel=1e-10)
        backend.step(optimizer)
        optimizer.zero_grad()
    state = backend.states.full_model(model, main_only=False)
    for name, value in expected.named_parameters():
        assert float((state[name] - value.detach()).abs().max()) <= 1e-10, name
    backend.close()


def refused(message: str, model: nn.Module, precision: str = "no", **options: Any) -> None:
    backend = open_backend(precision, degrees={"ep_size": 2}, **options)
    with pytest.raises(PrepareError, match=message):
        backend.prepare(Bundle([model], [torch.optim.SGD(model.parameters(), lr=0.1)]))
    backend.close()


@pytest.mark.ranks(2)
def test_experts_without_values_and_ignored_experts_are_refused(rank: int) -> None:
    with torch.device("meta"):
        on_meta = model_of(2)
    message = "Sequential is on the meta device, and ep_size=2 shards values; nearest: .* or ep_size=1"
    refused(message, on_meta, param_init_fn=lambda module: None)
    refused("ignored_modules holds 1.experts, .*leave it out", model_of(2), ignored_modules=r"\d\.experts")
