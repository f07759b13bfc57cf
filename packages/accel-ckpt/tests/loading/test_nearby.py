"""A place that is no checkpoint is refused with the checkpoints near it."""

import re
from pathlib import Path

import pytest
import torch

from accel_ckpt import CheckpointDirectory, open_checkpoint
from accel_state.errors import CheckpointError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    series = CheckpointDirectory(tmp_path / "checkpoints")
    for number in range(11):
        series.save({"weight": torch.ones(number)})
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_folder_of_a_series_or_a_project_names_its_checkpoints(project: Path) -> None:
    for folder, prefix in ((project / "checkpoints", ""), (project, "checkpoints/")):
        names = ", ".join(f"{prefix}checkpoint_{number}" for number in (8, 9, 10))
        told = f"no manifest.json, .*It holds 11 checkpoints: {names}; give the folder of one, such as {folder}/"
        with pytest.raises(CheckpointError, match=f"{told}{prefix}checkpoint_10$"):
            open_checkpoint(folder)


def test_a_link_to_a_checkpoint_counts(project: Path) -> None:
    (project / "logs" / "best").symlink_to(project / "checkpoints" / "checkpoint_3")
    with pytest.raises(CheckpointError, match="It holds the checkpoint best"):
        open_checkpoint(project / "logs")


def test_a_folder_without_checkpoints_holds_none(project: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint of this format$"):
        open_checkpoint(project / "logs")


def test_a_file_is_named_as_one(project: Path) -> None:
    checkpoint = project / "checkpoints" / "checkpoint_0"
    told = re.escape(f"that is a file, of the checkpoint {checkpoint}; give the folder of a checkpoint")
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(checkpoint / "manifest.json")
    (project / "notes").write_text("nothing")
    with pytest.raises(CheckpointError, match="notes: that is a file; give the folder of a checkpoint"):
        open_checkpoint(project / "notes")
