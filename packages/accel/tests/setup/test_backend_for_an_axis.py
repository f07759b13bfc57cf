"""A backend of another package that serves an axis: added by one file and one entry point, found by its name."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel_state import ConfigError, ParallelismConfig
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state

BACKEND = Path(__file__).with_name("torch_tensor_parallel.py")
EPOCHS = 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of packages with a distribution of one module and one entry point."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "torch_tensor_parallel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-tensor-parallel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.backends]\ntorch_tp = torch_tensor_parallel:TensorParallelBackend\n")
    (folder / BACKEND.name).write_text(BACKEND.read_text())
    return str(folder)


def install(site: str) -> None:
    if site not in sys.path:
        sys.path.insert(0, site)
        importlib.invalidate_caches()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(12, 6, generator=generator), torch.randn(12, 2, generator=generator))


def train_plainly() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, losses = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(samples(), batch_size=4):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model.state_dict(), losses


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def train_split(site: str) -> dict[str, Any]:
    """The same loop with an Accelerator that is given the backend's name and a degree."""
    install(site)
    accelerator = Accelerator(cpu=True, strategy="torch_tp", parallelism_config=ParallelismConfig(tp_size=2))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4))
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    first: Any = model[0].weight
    found = {
        "choice": str(accelerator.choice),
        "shape": tuple(first.to_local().shape),
        "data": (accelerator.data_shard.index, accelerator.data_shard.count),
        "place": accelerator.tensor_parallel_rank,
        "losses": losses,
        "state": full(model),
    }
    accelerator.end_training()
    return found


def test_its_name_selects_the_backend_and_numbers_are_those_of_one_process(rank_pool: RankPool, site: str) -> None:
    state, losses = train_plainly()
    for rank, found in enumerate(rank_pool.run(train_split, site, ranks=2)):
        assert found["choice"] == "backend torch_tp: strategy 'torch_tp' was asked for"
        assert (found["shape"], found["data"], found["place"]) == ((4, 6), (0, 1), rank)
        assert_close_state(found["state"], state, rtol=0, atol=1e-6)
        assert found["losses"] == pytest.approx(losses, abs=1e-6)


def choose(site: str, degrees: dict[str, int], strategy: str | None) -> str:
    install(site)
    accelerator = Accelerator(cpu=True, strategy=strategy, parallelism_config=ParallelismConfig(**degrees))
    name = accelerator.choice.name
    accelerator.end_training()
    return name


def test_a_named_strategy_still_counts(rank_pool: RankPool, site: str) -> None:
    assert rank_pool.run(choose, site, {"dp_replicate_size": 2}, None, ranks=2) == ["ddp"] * 2
    with pytest.raises(ConfigError, match="tp_size=2: backend 'ddp' cannot do that; nearest: strategy='fsdp'"):
        rank_pool.run(choose, site, {"tp_size": 2}, "ddp", ranks=2)


def test_axes_that_it_does_not_serve_are_refused(rank_pool: RankPool, site: str) -> None:
    with pytest.raises(ConfigError, match="dp_replicate_size=2: backend 'torch_tp' cannot do that; nearest: strategy="):
        rank_pool.run(choose, site, {"dp_replicate_size": 2}, "torch_tp", ranks=2)


def save_and_load(site: str, folder: str) -> list[bool]:
    install(site)
    accelerator = Accelerator(cpu=True, strategy="torch_tp", parallelism_config=ParallelismConfig(tp_size=2))
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    before = {name: value.clone() for name, value in full(model).items()}
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    same = [torch.equal(value, before[name]) for name, value in full(model).items()]
    accelerator.end_training()
    return same


def test_checkpoints_hold_the_shards_of_each_rank(rank_pool: RankPool, site: str, tmp_path: Path) -> None:
    found = rank_pool.run(save_and_load, site, str(tmp_path / "state"), ranks=2)
    assert all(found[0])
    assert len(found[0]) >= 6
    assert all(found[1])


def export(site: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict, the parameters, and the optimizer's state, each with full tensors."""
    install(site)
    accelerator = Accelerator(cpu=True, strategy="torch_tp", parallelism_config=ParallelismConfig(tp_size=2))
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with accelerator.full_parameters(model):
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            model[0].weight.zero_()
    changed = accelerator.backend.states.full_model(model, main_only=False)["0.weight"]
    assert not changed.any()
    optimizer.step()
    momenta = accelerator.backend.states.full_optimizer(optimizer.optimizer, [model])
    accelerator.end_training()
    return state, parameters, momenta


def test_default_states_gather_the_tensors_that_the_backend_has_split(rank_pool: RankPool, site: str) -> None:
    expected = mlp().state_dict()
    (state, parameters, momenta), (other, same, none) = rank_pool.run(export, site, ranks=2)
    assert (other, none) == ({}, {})
    for found in (state, parameters, same):
        assert {type(value) for value in found.values()} == {torch.Tensor}
        assert_close_state(found, expected, rtol=0, atol=0)
    assert momenta["state"]["0.weight"]["momentum_buffer"].shape == (8, 6)
