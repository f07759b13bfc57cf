"""Files of the user's own in checkpoints: written by hooks, or put there by hand."""

from pathlib import Path

import pytest
from torch import nn

from accel import Accelerator
from accel_ckpt import open_checkpoint
from accel_state.errors import CheckpointCorruptError, CheckpointError


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_that_hooks_write_are_part_of_the_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    places = []

    def write(models: list[nn.Module], weights: list[object], folder: str) -> None:
        places.append(folder)
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text(f'{{"number": {len(places)}}}')
        (Path(folder) / "note.txt").write_text("seen")

    accelerator.register_save_state_pre_hook(write)
    for _ in range(2):  # the second replaces the first
        accelerator.save_state(tmp_path / "saved", asynchronous=asynchronous)
    accelerator.end_training()
    assert not any(Path(place).exists() for place in places)
    saved = open_checkpoint(tmp_path / "saved")
    assert sorted(saved.manifest.extra) == ["note.txt", "unet/config.json"]
    seen = []
    handle = accelerator.register_load_state_pre_hook(
        lambda models, folder: seen.append((Path(folder) / "unet" / "config.json").read_text())
    )
    accelerator.load_state(tmp_path / "saved")
    assert seen == ['{"number": 2}']
    handle.remove()
    (tmp_path / "saved" / "unet" / "config.json").write_text('{"number": 3}')
    with pytest.raises(CheckpointCorruptError, match=r"unet/config.json"):
        open_checkpoint(tmp_path / "saved")


@pytest.mark.ranks(2)
def test_hooks_of_every_rank_write_into_the_same_checkpoint(tmp_path: Path, rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))

    def write(models: list[nn.Module], weights: list[object], folder: str) -> None:
        (Path(folder) / f"of-{rank}.txt").write_text(str(rank))
        if accelerator.is_main_process:
            (Path(folder) / "common.txt").write_text("main")

    accelerator.register_save_state_pre_hook(write)
    accelerator.save_state(tmp_path / "saved")
    saved = open_checkpoint(tmp_path / "saved")
    assert sorted(saved.manifest.extra) == ["common.txt", "of-0.txt", "of-1.txt"]


@pytest.mark.parametrize("name", ["tree.json", "manifest.json", "tensors-00000.safetensors"])
def test_a_hook_that_takes_a_name_of_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / name).write_text("x"))
    with pytest.raises(CheckpointError, match=f"a hook wrote {name}"):
        accelerator.save_state(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_what_a_user_puts_into_a_checkpoint_outlives_its_replacement(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("mine")
    (tmp_path / "saved" / "plots").mkdir()
    (tmp_path / "saved" / "plots" / "loss.png").write_text("mine too")
    for _ in range(2):
        accelerator.save_state(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
    assert (tmp_path / "saved" / "plots" / "loss.png").read_text() == "mine too"
    accelerator.load_state(tmp_path / "saved")
