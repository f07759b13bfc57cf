"""Parameters of a sharded model that are not sharded train as in one process, whichever of them ranks use."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends import Bundle, FSDP1Backend, FSDPBackend, FSDPConfig, Run
from accel_precision import PrecisionPolicy
from accel_state import PrepareError, Session

Uses = list[tuple[tuple[int, ...], tuple[int, ...]]]
#: Which of two scales each rank multiplies with, in each micro-batch of a step.
USES: dict[str, Uses] = {
    "not in the last micro-batch": [((0, 1), (0, 1)), ((), ())],
    "one for each rank": [((0,), (1,))],
    "on one rank": [((0,), ())],
    "in another order": [((0, 1), (1, 0))],
    "one of them never": [((0,), (0,)), ((0,), ())],
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + number)) for number in range(2))

    def forward(self, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
        x = self.body(x)
        for number in uses:
            x = x * self.scales[number]
        return x


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Scaled().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def run_on_cpu() -> Run:
    return Run(Session.open(cpu=True), PrecisionPolicy.parse("no", device_type="cpu"))


def opened(**options: Any) -> FSDPBackend:
    return FSDPBackend(run_on_cpu(), FSDPConfig(**options))


def loss_of(model: nn.Module, step: int, micro: int, rank: int, uses: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    loss: torch.Tensor = model(torch.randn(5, 4, generator=draw).double(), uses).square().mean()
    return loss


def accumulate(backend: FSDPBackend, model: nn.Module, expected: nn.Module, step: int, uses: Uses) -> None:
    """Backwards of one window: of this rank's losses in ``model``, and of the mean over ranks in ``expected``."""
    rank = backend.session.rank
    for micro, used in enumerate(uses):
        with backend.no_sync(model) if micro < len(uses) - 1 else nullcontext():
            backend.backward(loss_of(model, step, micro, rank, used[rank]))
        for each in range(2):
            (loss_of(expected, step, micro, each, used[each]) / 2).backward()


def assert_equal(backend: FSDPBackend, model: nn.Module, expected: nn.Module) -> None:
    for name, value in backend.states.full_model(model, main_only=False).items():
        torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [False, True], ids=["once", "prepared again"])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
@pytest.mark.sampled(3)
def test_scales_train_as_in_one_process(uses: Uses, again: bool) -> None:
    backend = opened()
    (model, optimizer), (expected, stepping) = made(), made()
    backend.prepare(Bundle([model], [optimizer]))
    if again:
        backend.release([model])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        backend.prepare(Bundle([model], [optimizer]))
    for step in range(2):
        accumulate(backend, model, expected, step, uses)
        for scale, other in zip(model.scales, expected.scales, strict=True):
            assert (scale.grad is None) == (other.grad is None)
        backend.step(optimizer)
        stepping.step()
        for one in (optimizer, stepping):
            one.zero_grad()
    assert_equal(backend, model, expected)


@pytest.mark.ranks(2)
def test_scales_are_averaged_by_a_backward_by_hand(rank: int) -> None:
    backend = opened()
    (model, optimizer), (expected, _) = made(), made()
    backend.prepare(Bundle([model], [optimizer]))
    loss_of(model, 0, 0, rank, (0, 1)).backward()
    for each in range(2):
        (loss_of(expected, 0, 0, each, (0, 1)) / 2).backward()
    for scale, other in zip(model.scales, expected.scales, strict=True):
        torch.testing.assert_close(scale.grad, other.grad)


class Branched(nn.Module):
    """Layers, and an adapter that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.adapter = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
        x = self.body(x)
        return self.head(self.adapter(x) if uses else x)


def branched(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Branched().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


@pytest.mark.ranks(2)
def test_ignored_modules_train_as_in_one_process(rank: int) -> None:
    backend = opened(ignored_modules="adapter")
    (model, optimizer), (expected, stepping) = branched(rank), branched()
    backend.prepare(Bundle([model], [optimizer]))
    for step, uses in enumerate(USES.values()):
        accumulate(backend, model, expected, step, uses)
        norm = backend.gradients.clip_norm(model.parameters(), 0.5)
        wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted, rtol=1e-10, atol=1e-12)
        backend.step(optimizer)
        stepping.step()
        for one in (optimizer, stepping):
            one.zero_grad()
    assert_equal(backend, model, expected)


@pytest.mark.ranks(2)
def test_gradients_of_ignored_modules_are_averaged_by_a_backward_by_hand(rank: int) -> None:
    backend = opened(ignored_modules="adapter")
    (model, optimizer), (expected, _) = branched(), branched()
    backend.prepare(Bundle([model], [optimizer]))
    for micro in range(2):
        with backend.no_sync(model) if micro == 0 else nullcontext():
            loss_of(model, 0, micro, rank, (0,)).backward()
        for each in range(2):
            (loss_of(expected, 0, micro, each, (0,)) / 2).backward()
    for parameter, other in zip(model.adapter.parameters(), expected.adapter.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_version_1_refuses_ignored_modules_that_train() -> None:
    backend = FSDP1Backend(run_on_cpu(), FSDPConfig(fsdp_version=1, ignored_modules="adapter"))
    model, optimizer = branched()
    with pytest.raises(PrepareError, match=r"adapter\.0\.weight trains, .*nearest: fsdp_version=2"):
        backend.prepare(Bundle([model], [optimizer]))


@pytest.mark.ranks(2)
def test_a_sparse_embedding_among_ignored_modules_trains_as_in_one_process(rank: int) -> None:
    def words() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1)).double()

    model, expected = words(), words()
    own, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, expected))
    backend = opened(ignored_modules="0")
    backend.prepare(Bundle([model], [own]))
    for step in range(2):
        rows = [torch.tensor([step, 2 + each]) for each in range(2)]
        with backend.no_sync(model):
            backend.backward(model(rows[rank]).square().mean())
        backend.backward(model(rows[1 - rank]).square().mean())
        for each in rows:
            expected(each).square().mean().backward()
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight, expected[0].weight)
