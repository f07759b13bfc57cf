"""Checkpoints of ranks that do not hold the same: each keeps what is its own, and models are never mixed."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel_ckpt import open_checkpoint
from accel_state.errors import CheckpointError

WIDE = 200  # parameters large enough to be spread over the ranks


def trained_apart(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.full((4, WIDE), 0.01 * (accelerator.process_index + 1))
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def run() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in optimizer.optimizer.state.values()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_local_sgd_is_saved_where_models_meet_and_refused_between(
    rank: int, tmp_path: Path, asynchronous: bool
) -> None:
    accelerator, model, optimizer = run()
    with LocalSGD(accelerator, model, 2) as local:
        trained_apart(accelerator, model, optimizer, 1)
        local.step()
        with pytest.raises(CheckpointError, match=r"model/0.bias, .*\(rank 1\): .*Inside LocalSGD save right after"):
            accelerator.save_state(tmp_path / "apart", asynchronous=asynchronous)
        trained_apart(accelerator, model, optimizer, 1)
        local.step()
        accelerator.save_state(tmp_path / "met", asynchronous=asynchronous)
        own = moments(optimizer)
        accelerator.end_training()
    assert not (tmp_path / "apart").exists()
    again, _, restored = run()
    again.load_state(tmp_path / "met")
    assert all(torch.equal(one, two) for one, two in zip(moments(restored), own, strict=True))
    first = open_checkpoint(tmp_path / "met").read("optimizer")["state"]["0.weight"]["exp_avg"]
    assert torch.equal(first, own[0]) == (rank == 0)


@pytest.mark.ranks(2)
def test_a_model_that_has_drifted_is_saved_as_the_first_rank_has_it(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with torch.no_grad():
        accelerator.unwrap_model(model).weight.fill_(1 + rank)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_ckpt").addHandler(handler)
    accelerator.save_state(tmp_path / "saved")
    logging.getLogger("accel_ckpt").removeHandler(handler)
    weight = open_checkpoint(tmp_path / "saved").read("model")["weight"]
    assert weight.unique().tolist() == [1.0]
    assert any("model/weight (rank 1)" in one for one in told) == (rank == 0)


class Own:
    """A registered object of which each rank has another."""

    def __init__(self, value: float) -> None:
        self.memory = torch.full((2**15,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"memory": self.memory}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.memory = state["memory"].clone()


@pytest.mark.ranks(2)
def test_each_rank_gets_its_own_registered_object_back(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(same := Own(7.0), own := Own(float(rank)))
    accelerator.save_state(tmp_path / "saved")
    same.memory.zero_()
    own.memory.fill_(9.0)
    accelerator.load_state(tmp_path / "saved")
    assert same.memory.unique().tolist() == [7.0]
    assert own.memory.unique().tolist() == [float(rank)]
    assert open_checkpoint(tmp_path / "saved").local_names(1) == ["rng", "custom_1"]
    assert model is not None


class Anything:
    """A registered object with any state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"x": 1}, {"y": torch.ones(3)}),
        ({"seen": {"a": 1}}, {"seen": {"a": 1, "b": 2}}),
        ({"seen": {1: "a", 2: "b"}}, {"seen": {2: "b"}}),
        ([1], "text"),
    ],
)
def test_objects_with_other_keys_on_each_rank_are_not_mixed(
    rank: int, tmp_path: Path, first: object, second: object
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    own = second if rank else first
    accelerator.register_for_checkpointing(held := Anything(own))
    accelerator.save_state(tmp_path / "saved")
    held.state = None
    accelerator.load_state(tmp_path / "saved")
    assert str(held.state) == str(own)


@pytest.mark.ranks(2)
def test_optimizer_states_of_other_parameters_on_each_rank_are_not_mixed(rank: int, tmp_path: Path) -> None:
    accelerator, model, optimizer = run()
    trained_apart(accelerator, model, optimizer, 1)
    inner = optimizer.optimizer
    del inner.state[inner.param_groups[0]["params"][rank]]
    accelerator.save_state(tmp_path / "saved")
    again, _, restored = run()
    again.load_state(tmp_path / "saved")
    stepped = [parameter in restored.optimizer.state for parameter in restored.optimizer.param_groups[0]["params"]]
    assert stepped == [number != rank for number in range(4)]


@pytest.mark.ranks(2)
def test_buffers_that_are_not_kept_equal_are_those_of_the_first_rank(rank: int, tmp_path: Path) -> None:
    from accel.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    model = accelerator.prepare(nn.BatchNorm1d(3))
    model(torch.full((4, 3), float(rank)))
    accelerator.save_state(tmp_path / "saved")
    mean = open_checkpoint(tmp_path / "saved").read("model")["running_mean"]
    assert mean.unique().tolist() == [0.0]


class Computed:
    """A registered object that holds a tensor with a graph behind it."""

    def __init__(self) -> None:
        self.value = torch.ones(2, requires_grad=True) * 2

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def test_objects_with_a_graph_are_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(computed := Computed())
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    assert computed.value.tolist() == [2.0, 2.0]
