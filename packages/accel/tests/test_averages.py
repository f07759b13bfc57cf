"""Averages of weights (EMA), gradients by name and other methods than forward, on every backend as in one process."""

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel import Accelerator
from accel_precision import GradScalerKwargs, LossScaler
from accel_state import BackendError

RANKS = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": {"fsdp_version": 2}},
    "fsdp1": {"fsdp_plugin": {"fsdp_version": 1}},
    **{f"ds{stage}": {"deepspeed_plugin": {"zero_stage": stage}} for stage in range(4)},
}


def each(*left_out: str) -> Any:
    absent = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
    return pytest.mark.parametrize(
        "strategy",
        [
            pytest.param(name, marks=absent if name.startswith("ds") else ())
            for name in STRATEGIES
            if name not in left_out
        ],
    )


class Net(nn.Module):
    """A head that a method of its own leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Average:
    """An average of the weights that a rank holds, registered as an object of the user's."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, one in model.named_parameters():
            self.weights[name].lerp_(one.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "rate": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.weights.items():
            one.copy_(state["weights"][name])


class Beside:
    """A model of an Accelerator, and the same model trained by one process on the samples of all ranks."""

    def __init__(self, strategy: str, rank: int) -> None:
        self.accelerator = Accelerator(cpu=True, **STRATEGIES[strategy])
        self.rank = rank
        self.bare, self.reference = Net(), Net()
        self.model, self.optimizer = self.accelerator.prepare(self.bare, momentum(self.bare))
        self.plain = momentum(self.reference)

    def backward(self, step: int) -> None:
        self.accelerator.backward(self.model(batch(step, self.rank)).square().mean())
        for rank in range(RANKS):
            (self.reference(batch(step, rank)).square().mean() / RANKS).backward()

    def step(self) -> None:
        for one in (self.optimizer, self.plain):
            one.step()
            one.zero_grad()

    def end(self) -> None:
        self.accelerator.free_memory()
        self.accelerator.end_training()


def assert_close(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(RANKS)
@each()
@pytest.mark.sampled(2)
def test_torchs_averaged_model_follows_full_parameters(rank: int, strategy: str) -> None:
    mean = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    beside = Beside(strategy, rank)
    expected = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(4):
        beside.backward(step)
        beside.step()
        with beside.accelerator.full_parameters(beside.model, writeback=False):
            mean.update_parameters(beside.model)
        expected.update_parameters(beside.reference)
    assert_close(dict(mean.module.named_parameters()), dict(expected.module.named_parameters()))
    beside.end()


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_a_copy_that_is_prepared_too_follows_part_by_part(rank: int, strategy: str) -> None:
    beside = Beside(strategy, rank)
    mean: Any = beside.accelerator.prepare(Net().requires_grad_(False))
    expected = deepcopy(beside.reference)
    for step in range(4):
        beside.backward(step)
        beside.step()
        with torch.no_grad():
            for average, parameter in zip(mean.parameters(), beside.model.parameters(), strict=True):
                average.lerp_(parameter, 0.2)
            for average, parameter in zip(expected.parameters(), beside.reference.parameters(), strict=True):
                average.lerp_(parameter, 0.2)
    with torch.no_grad():
        torch.testing.assert_close(mean(batch(9, rank)), expected(batch(9, rank)), rtol=1e-5, atol=1e-6)
    beside.end()


@pytest.mark.ranks(RANKS)
@each("ddp", "ds0")
def test_a_copy_of_the_prepared_model_is_refused_with_what_works(rank: int, strategy: str) -> None:
    beside = Beside(strategy, rank)
    for copied in (deepcopy, AveragedModel):
        with pytest.raises(BackendError, match=r"copy the bare model before prepare.*full_parameters"):
            copied(beside.model)
    beside.end()


@pytest.mark.ranks(RANKS)
@each()
@pytest.mark.sampled(2)
def test_gradients_are_read_by_name(rank: int, strategy: str) -> None:
    beside = Beside(strategy, rank)
    for step in range(2):
        beside.backward(step)
        expected = {name: parameter.grad.clone() for name, parameter in beside.reference.named_parameters()}  # type: ignore[union-attr]
        assert_close(beside.accelerator.full_gradients(beside.model), expected)
        beside.step()
    assert_close(dict(beside.accelerator.full_gradients(beside.model)), {})
    state = beside.accelerator.get_state_dict(beside.model)
    if rank == 0:
        assert_close(state, dict(beside.reference.state_dict()))
    beside.end()


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ds2"])
def test_gradients_by_name_have_no_loss_scale(rank: int, strategy: str) -> None:
    """A scaler as of fp16, which CPUs do not compute in."""
    beside = Beside(strategy, rank)
    if strategy == "ds2":
        beside.model.optimizer.loss_scaler.cur_scale = 8.0
    else:
        backend = beside.accelerator.backend
        backend.loss_scale = backend.gradients.loss_scale = LossScaler(GradScalerKwargs(init_scale=8.0))
    beside.backward(0)
    expected = {name: parameter.grad for name, parameter in beside.reference.named_parameters()}
    for _ in range(2):
        assert_close(beside.accelerator.full_gradients(beside.model), expected)  # type: ignore[arg-type]
    beside.end()


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_gradients_by_name_wait_for_the_end_of_a_window(rank: int, strategy: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **STRATEGIES[strategy])
    bare = Net()
    model, _ = accelerator.prepare(bare, momentum(bare))
    with accelerator.accumulate(model):
        accelerator.backward(model(batch(0, rank)).mean())
        with pytest.raises(BackendError, match=r"where accelerator\.sync_gradients is True"):
            accelerator.full_gradients(model)
    accelerator.end_training()


@pytest.mark.ranks(RANKS)
def test_a_method_that_is_registered_is_gathered_by_fsdp(rank: int) -> None:
    """The way that the error about ``encode`` names."""
    beside = Beside("fsdp", rank)
    with pytest.raises(BackendError, match=r"register_fsdp_forward_method.*for a method that forward does not call"):
        beside.model.encode(batch(0, rank))
    register_fsdp_forward_method(beside.accelerator.unwrap_model(beside.model), "encode")
    for step in range(3):
        beside.accelerator.backward(beside.model.encode(batch(step, rank)).square().mean())
        for one in range(RANKS):
            (beside.reference.encode(batch(step, one)).square().mean() / RANKS).backward()
        beside.step()
    state = beside.accelerator.get_state_dict(beside.model)
    if rank == 0:
        assert_close(state, dict(beside.reference.state_dict()))
    beside.end()


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_registered_average_of_what_a_rank_holds_is_loaded_as_it_is_held(
    rank: int, strategy: str, tmp_path: Path
) -> None:
    one = Beside(strategy, rank)
    average = Average(one.model)
    one.accelerator.register_for_checkpointing(average)
    one.backward(0)
    one.optimizer.step()
    average.update(one.model)
    one.accelerator.save_state(tmp_path / "saved")
    kept = {name: value.clone() for name, value in average.weights.items()}
    average.update(one.model)
    one.accelerator.load_state(tmp_path / "saved")
    for name, value in average.weights.items():
        assert type(value) is type(kept[name])
        assert torch.equal(full(value), full(kept[name]))


def full(tensor: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered
