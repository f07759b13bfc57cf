"""Models without values get them shard by shard."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDPBackend, FSDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import AccelError, Session
from accel_testing.equivalence.models import TinyTransformer, WithBuffers, make_model


def open_backend(**options: Any) -> FSDPBackend:
    return FSDPBackend(Run(Session.open(cpu=True), PrecisionPolicy()), FSDPConfig(**options))


def whole(backend: FSDPBackend, model: nn.Module) -> dict[str, torch.Tensor]:
    return backend.states.full_model(model, main_only=False)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return TinyTransformer()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_model_on_the_meta_device_is_initialised_alike_on_all_ranks(rank: int, strategy: str) -> None:
    torch.manual_seed(rank)
    backend = open_backend(sharding_strategy=strategy)
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backend.prepare(Bundle([model], [optimizer]))
    state = {name: value.clone() for name, value in whole(backend, model).items()}
    assert 0.8 < float(state["position.weight"].std()) < 1.2
    assert bool((state["norm.weight"] == 1.0).all())
    assert not torch.equal(state["blocks.0.qkv.weight"], state["blocks.1.qkv.weight"])
    assert model.head.weight is model.embedding.weight
    backend.backward(model(torch.zeros(2, 4, dtype=torch.int64)).square().mean())
    assert backend.step(optimizer)
    assert not torch.equal(whole(backend, model)["norm.weight"], state["norm.weight"])


@pytest.mark.ranks(2)
def test_values_on_rank_0_are_enough(rank: int) -> None:
    backend = open_backend()
    model = make_model("transformer", seed=3) if rank == 0 else on_meta()
    backend.prepare(Bundle([model]))
    for name, value in make_model("transformer", seed=3).named_parameters():
        assert torch.equal(whole(backend, model)[name], value), name


@pytest.mark.ranks(2)
def test_other_ranks_values_can_be_dropped_first(rank: int) -> None:
    backend = open_backend(cpu_ram_efficient_loading=True)
    model = WithBuffers()
    with torch.no_grad():
        model.norm.running_mean.fill_(3.0 + rank)
        model.linear.bias.fill_(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend.prepare(Bundle([model], [optimizer]))
    state = whole(backend, model)
    assert bool((state["norm.running_mean"] == 3.0).all())
    assert bool((state["linear.bias"] == 0.0).all())
    backend.backward(model(torch.randn(4, 8)).mean())
    assert backend.step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_all_shards_train_where_other_ranks_values_are_dropped(rank: int, stepped: bool) -> None:
    def step(model: nn.Module, optimizer: Any, backward: Any, tokens: torch.Tensor) -> None:
        backward(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()))
        optimizer.step()
        optimizer.zero_grad()

    batches = torch.randint(0, 32, (3, 4, 6), generator=torch.Generator().manual_seed(0))
    backend = open_backend(cpu_ram_efficient_loading=True)
    model, expected = (make_model("transformer", dtype=torch.float64) for _ in range(2))
    optimizer, stepping = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, expected))
    for one, other in ((model, optimizer), (expected, stepping)) if stepped else ():
        step(one, other, torch.Tensor.backward, batches[0])
    backend.prepare(Bundle([model], [optimizer]))
    for tokens in batches[1:]:
        step(expected, stepping, torch.Tensor.backward, tokens)
        step(model, optimizer, backend.backward, tokens.chunk(2)[rank])
    state = whole(backend, model)
    for name, value in expected.named_parameters():
        assert float((state[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name


class Own(nn.Module):
    """No reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


def fives(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(5.0)


@pytest.mark.ranks(2)
def test_a_module_may_be_given_an_initialiser() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Own(), nn.Linear(4, 2))
    backend = open_backend(param_init_fn=fives)
    backend.prepare(Bundle([model]))
    assert {float(value.mean()) for value in whole(backend, model).values()} == {5.0}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no initialiser", r"Own has no reset_parameters\(\).*give param_init_fn"),
        ("wrong rank", r"rank 0 has its model on the meta device, and ranks \[1\] have values"),
        ("not sent", "sync_module_states=False forbids"),
    ],
)
def test_values_that_cannot_come_are_refused_on_all_ranks(rank: int, case: str, message: str) -> None:
    backend = open_backend(sync_module_states=case != "not sent")
    if case == "no initialiser":
        with torch.device("meta"):
            model: nn.Module = Own()
    else:
        model = on_meta() if (rank == 0) == (case == "wrong rank") else make_model("transformer")
    with pytest.raises(AccelError, match=message):
        backend.prepare(Bundle([model]))
