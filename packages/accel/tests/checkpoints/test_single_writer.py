"""``if accelerator.is_main_process: accelerator.save_state(...)`` saves where that is possible, and never hangs."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_ckpt import open_checkpoint
from accel_ckpt.saving import save_quorum
from accel_state.errors import CheckpointError
from accel_testing.pytest.logs import heard


def shorten(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> None:
    """Graces that a test can wait for."""
    monkeypatch.setattr(save_quorum, "GRACE", seconds)
    monkeypatch.setattr(save_quorum, "AHEAD_GRACE", seconds)


def lengthen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graces that nobody may wait for to their end, as all come, however slow the machine is."""
    shorten(monkeypatch, 1e6)


def trained(folder: Path | None = None, **options: object) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    project = None if folder is None else ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project, **options)  # type: ignore[arg-type]
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


@pytest.mark.ranks(2)
def test_the_main_process_alone_saves_everything_it_holds(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    accelerator, model, _ = trained(tmp_path)
    with heard("accel") as said:
        for number in range(3):
            if accelerator.is_main_process:
                accelerator.save_state(metadata={"number": number})
                monkeypatch.setattr(save_quorum, "GRACE", 1e6)  # the others are waited for once
    assert sum("rank 1 did not come" in one for one in said) == (rank == 0)
    accelerator.wait_for_everyone()
    weight = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.zero_()
    assert accelerator.load_state().name == "checkpoint_2"
    assert torch.equal(model.module.weight, weight)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.ranks(2)
def test_all_processes_together_are_not_held_up(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen(monkeypatch)
    accelerator, _, _ = trained()
    accelerator.save_state(tmp_path / "a")
    assert open_checkpoint(tmp_path / "a").world_size == 2
    accelerator.wait_for_everyone()


@pytest.mark.ranks(2)
def test_a_process_that_comes_late_is_waited_for_from_then_on(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    accelerator, _, _ = trained()
    if rank == 0:
        accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()
    if rank == 1:
        accelerator.save_state(tmp_path / "a")  # 300 ms and more too late: it is over, and nothing waits
    accelerator.wait_for_everyone()
    lengthen(monkeypatch)
    accelerator.save_state(tmp_path / "b")
    accelerator.wait_for_everyone()
    assert open_checkpoint(tmp_path / "a").world_size == 1
    assert open_checkpoint(tmp_path / "b").world_size == 2


@pytest.mark.ranks(2)
def test_sharded_state_needs_everybody_and_says_who_is_missing(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    accelerator, _, _ = trained(strategy="fsdp")
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"rank 1 did not come to save_state.*holds a part only \(fsdp\)"):
            accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()
    assert not (tmp_path / "a").exists()
    accelerator.wait_for_everyone()
    if rank == 1:
        with pytest.raises(CheckpointError, match="rank 1 did not come"):
            accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()
    lengthen(monkeypatch)
    accelerator.save_state(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")


@pytest.mark.ranks(2)
def test_an_open_window_needs_everybody(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    accelerator, model, _ = trained(gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 64)).sum())
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"rank 1 did not come.*a window is open"):
            accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_slow_process_is_waited_for_where_it_is_needed(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 1.0)
    accelerator, model, _ = trained(gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 64)).sum())
    if rank == 1:
        until = time.monotonic() + 4
        while time.monotonic() < until:  # computes
            pass
    accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()
    with open_checkpoint(tmp_path / "a") as saved:
        assert saved.world_size == 2


@pytest.mark.ranks(2)
def test_a_process_that_stands_in_an_operation_of_torch_is_given_up(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 1.0)
    accelerator, _, _ = trained(strategy="fsdp")
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"rank 1 did not come(?s:.*)rank 1 is at \S*test_single_writer\.py"):
            accelerator.save_state(tmp_path / "a")
    torch.distributed.barrier()
    accelerator.wait_for_everyone()


@pytest.mark.ranks(2)
def test_a_process_in_a_later_backward_is_given_up(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen(monkeypatch)
    monkeypatch.setattr(save_quorum, "AHEAD_GRACE", 0.3)
    accelerator, model, optimizer = trained()
    for number in range(40):  # more than the hang watchdog remembers
        accelerator.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
        if number == 38 and rank == 0:
            accelerator.save_state(tmp_path / "a")
    accelerator.wait_for_everyone()
    with open_checkpoint(tmp_path / "a") as saved:
        assert saved.world_size == 1


@pytest.mark.ranks(2)
def test_two_accelerators_do_not_mix_their_saves(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    first, *_ = trained()
    second, *_ = trained()
    if rank == 0:
        first.save_state(tmp_path / "first")
    first.wait_for_everyone()
    lengthen(monkeypatch)
    second.save_state(tmp_path / "second")
    second.wait_for_everyone()
    with open_checkpoint(tmp_path / "second") as saved:
        assert saved.world_size == 2


@pytest.mark.ranks(2)
def test_what_one_process_saved_alone_resumes_on_both(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    accelerator, _, optimizer = trained()
    if rank == 0:
        accelerator.save_state(tmp_path / "a", asynchronous=True)
    accelerator.wait_for_everyone()
    accelerator.load_state(tmp_path / "a")
    draws = accelerator.gather(torch.rand(1)).tolist()
    assert draws[0] != draws[1], "random states of processes are their own"
    assert optimizer.state_dict()["state"][0]["step"] == 1
