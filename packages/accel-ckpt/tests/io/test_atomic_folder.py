"""Atomic folder: its commit, and leftovers of saves that failed."""

import os
from pathlib import Path
from threading import Event, Thread

import pytest

import accel_ckpt
from accel_ckpt.io import atomic_folder
from accel_ckpt.io.atomic_folder import Staging, sweep
from accel_state.errors import CheckpointError
from accel_testing.faults.faults import injected


def test_a_dropped_folder_is_gone_although_another_rank_still_writes_into_it(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "one", overwrite=False)
    folder = Path(staging.folder)
    many = Event()

    def write() -> None:
        for number in range(1_000_000):
            try:
                (folder / f"{number}.bin").touch()
            except FileNotFoundError:
                return
            if number == 2000:
                many.set()

    writer = Thread(target=write)
    writer.start()
    assert many.wait(60)
    staging.drop()
    writer.join(60)
    assert not writer.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_moved_aside_is_put_back_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_folder, "_exchange", lambda one, other: False)  # as on systems that cannot swap names
    accel_ckpt.save(tmp_path / "one", {"n": 1})
    with (
        injected("raise(EIO) at call 2 of os:rename"),
        pytest.raises(CheckpointError, match="cannot be committed: Input/output error"),
    ):
        accel_ckpt.save(tmp_path / "one", {"n": 2})
    assert accel_ckpt.open_checkpoint(tmp_path / "one").read("n") == 1
    assert os.listdir(tmp_path) == ["one"]


def test_the_folders_that_a_first_save_creates_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Path] = set()
    monkeypatch.setattr(atomic_folder, "sync_folder", synced.add)
    accel_ckpt.save(tmp_path / "project" / "checkpoints" / "one", {"n": 1})
    assert {tmp_path, tmp_path / "project", tmp_path / "project" / "checkpoints"} <= synced


def test_leftovers_are_swept_whatever_characters_are_in_the_name(tmp_path: Path) -> None:
    dead = Staging(tmp_path / "a\nb", overwrite=False)
    os.close(dead._handle)  # type: ignore[arg-type]  # what the operating system does when a process ends
    assert sweep(tmp_path) == [dead.folder]
    assert os.listdir(tmp_path) == []
