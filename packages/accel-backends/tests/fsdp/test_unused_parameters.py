"""With ``find_unused_parameters``, a parameter that no rank used has no gradient; others have those of one process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from accel_backends import Bundle, FSDPBackend, FSDPConfig, Run
from accel_backends.fsdp.validate import is_sharded
from accel_precision import PrecisionPolicy
from accel_state import Session

if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    pytest.skip("find_unused_parameters needs a newer torch", allow_module_level=True)

#: Which of two layers a sample goes through: by step, micro-batch and rank. None: neither.
Route = Callable[[int, int, int], int | None]
ROUTES: dict[str, Route] = {
    "the same one": lambda step, micro, rank: 0,
    "in turns": lambda step, micro, rank: step % 2,
    "one for each rank": lambda step, micro, rank: rank,
    "one rank uses none": lambda step, micro, rank: 0 if rank else None,
    "in turns, on one rank": lambda step, micro, rank: step % 2 if rank else None,
    "none in some steps": lambda step, micro, rank: None if step == 1 else 1,
    "in the first micro-batch": lambda step, micro, rank: step % 2 if micro == 0 else None,
    "in the last micro-batch": lambda step, micro, rank: step % 2 if micro == 1 else None,
}
STEPS, MICRO = 4, 2


class Choice(nn.Module):
    """One unit with two layers, of which a call uses one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, route: int | None) -> torch.Tensor:
        x = x + self.shift
        return x if route is None else x + torch.tanh(self.layers[route](x))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 3)
        self.choices = nn.ModuleList([Choice(), Choice()])

    def forward(self, x: torch.Tensor, route: int | None) -> torch.Tensor:
        x = self.stem(x)
        for choice in self.choices:
            x = choice(x, route)
        return x


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Routed().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def sample(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)).double()


def opened() -> FSDPBackend:
    config = FSDPConfig(find_unused_parameters=True, transformer_cls_names_to_wrap=["Choice"])
    return FSDPBackend(Run(Session.open(cpu=True), PrecisionPolicy.parse("no", device_type="cpu")), config)


def assert_as_one_process(backend: FSDPBackend, route: Route) -> None:
    ranks, rank = backend.session.world_size, backend.session.rank
    expected, stepping = made()
    model, optimizer = made()
    backend.prepare(Bundle([model], [optimizer]))
    assert is_sharded(model.choices[0])
    for step in range(STEPS):
        for micro in range(MICRO):
            for one in range(ranks):
                whole = expected(sample(step, micro, one), route(step, micro, one)).square().mean()
                (whole / ranks / MICRO).backward()
            loss = model(sample(step, micro, rank), route(step, micro, rank)).square().mean()
            if micro < MICRO - 1:
                with backend.no_sync(model):
                    backend.backward(loss, scale=1 / MICRO)
            else:
                backend.backward(loss, scale=1 / MICRO)
        without = {name for name, one in expected.named_parameters() if one.grad is None}
        assert {name for name, one in model.named_parameters() if one.grad is None} == without
        stepping.step()
        stepping.zero_grad()
        backend.step(optimizer)
        optimizer.zero_grad()
    state = backend.states.full_model(model, main_only=False)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=1e-10, atol=1e-12)
    backend.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.sampled(2)
def test_ranks_that_use_different_layers_of_a_unit_train_as_one_process(rank: int, route: Route) -> None:
    assert_as_one_process(opened(), route)


@pytest.mark.ranks(1)
def test_one_process_trains_as_without_shards(rank: int) -> None:
    assert_as_one_process(opened(), ROUTES["in turns"])


@pytest.mark.ranks(2)
def test_a_gradient_of_zero_is_one(rank: int) -> None:
    backend = opened()
    model, optimizer = made()
    backend.prepare(Bundle([model], [optimizer]))
    backend.backward(0.0 * model(sample(0, 0, rank), 0).sum())
    first, second = (layer.weight.grad for layer in model.choices[0].layers)
    assert second is None
    assert not first.full_tensor().any()


@pytest.mark.ranks(2)
def test_gradients_of_an_earlier_backward_stay(rank: int) -> None:
    backend = opened()
    model, optimizer = made()
    backend.prepare(Bundle([model], [optimizer]))
    for route in (0, 1):
        backend.backward(model(sample(0, 0, rank), route).square().mean())
        if route == 0:
            before = model.choices[0].layers[0].weight.grad.full_tensor().clone()
    first, second = (layer.weight.grad.full_tensor() for layer in model.choices[0].layers)
    assert torch.equal(first, before)
    assert second.any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", ["prepare", "fully_shard"])
def test_a_model_that_is_sharded_already_has_no_gradient_of_unused_layers(rank: int, first: str) -> None:
    backend = opened()
    model, optimizer = made()
    if first == "prepare":
        backend.prepare(Bundle([model], [optimizer]))
        backend.backward(model(sample(0, 0, rank), 1).square().mean())
        backend.release([model])
        model.zero_grad()
    else:
        for module in (*model.choices, model):
            fully_shard(module)
    backend.prepare(Bundle([model], [torch.optim.AdamW(model.parameters())]))
    backend.backward(model(sample(1, 0, rank), 0).square().mean())
    used, unused = (layer.weight for layer in model.choices[0].layers)
    assert used.grad is not None
    assert unused.grad is None
    backend.release([model])
    if first == "fully_shard":
        whole = (entry._unsharded_param for entry in model.choices[0]._get_fsdp_state()._fsdp_param_group.fsdp_params)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in whole)
