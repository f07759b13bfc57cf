"""Machines without a common disk: each keeps all of a checkpoint, and a run goes on from what each has."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_ckpt import open_checkpoint
from accel_ckpt.saving import save_quorum
from accel_state.errors import CheckpointError


def join(monkeypatch: pytest.MonkeyPatch, rank: int) -> int:
    """Puts this rank of four on one of two machines, as torchrun would; gives the machine's number."""
    places = {"LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 2}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    return rank // 2


def run(disk: Path, strategy: str) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    project = ProjectConfiguration(disk, automatic_checkpoint_naming=True, total_limit=2, save_on_each_node=True)
    accelerator = Accelerator(cpu=True, project_config=project, strategy=strategy)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.randn(4, 5)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.sampled(1)
def test_each_machine_goes_on_from_its_own_disk(
    tmp_path: Path, rank: int, strategy: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / f"machine{join(monkeypatch, rank)}"
    accelerator, model, optimizer = run(disk, strategy)
    for number in range(3):
        step(accelerator, model, optimizer)
        accelerator.save_state(metadata={"number": number}, asynchronous=asynchronous)
    draw = torch.rand(3)
    accelerator.load_state()
    assert torch.equal(torch.rand(3), draw), "random state is this rank's own"
    accelerator.wait_for_everyone()
    assert sorted(os.listdir(disk / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    step(accelerator, model, optimizer)
    assert accelerator.load_state() == disk / "checkpoints" / "checkpoint_2"
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, state[name]), name
    saved = open_checkpoint(disk / "checkpoints" / "checkpoint_2")
    assert saved.world_size == 4
    whole = saved.read("model")
    assert all(torch.equal(whole[name], value) for name, value in state.items())


@pytest.mark.ranks(4)
def test_a_machine_without_the_newest_takes_all_to_one_that_all_have(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / f"machine{join(monkeypatch, rank)}"
    accelerator, model, optimizer = run(disk, "fsdp")
    assert accelerator.resume() is None
    for _ in range(2):
        step(accelerator, model, optimizer)
        accelerator.save_state()
    if rank == 2:
        (disk / "checkpoints" / "checkpoint_1" / "tree.json").write_text("damaged")
    accelerator.wait_for_everyone()
    assert accelerator.resume() == disk / "checkpoints" / "checkpoint_0"


@pytest.mark.ranks(4)
def test_copies_on_each_machine_need_all_processes(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_quorum, "GRACE", 0.3)
    accelerator, _, _ = run(tmp_path / f"machine{join(monkeypatch, rank)}", "ddp")
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"ranks 1, 2, 3 did not come.*each machine keeps a copy"):
            accelerator.save_state()
    accelerator.wait_for_everyone()
