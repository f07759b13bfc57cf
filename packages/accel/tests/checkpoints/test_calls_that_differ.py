"""Calls of save_state and load_state that differ on one rank: an error on all ranks, and the next call works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_state.errors import AccelError, CheckpointError, ConfigError


class Fragile(nn.Linear):
    """A model whose state can fail."""

    broken = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise KeyError("broken")
        return super().state_dict(*args, **kwargs)


class Counted:
    """A registered object."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"count": 1}


def failing(*_: Any) -> None:
    raise OSError("no such config")


def load_hook_fails(accelerator: Accelerator, folder: Path, differs: bool) -> None:
    handle = accelerator.register_load_state_pre_hook(failing if differs else lambda models, folder: None)
    try:
        accelerator.load_state(folder)
    finally:
        handle.remove()


def load_hook_of_one_fails(accelerator: Accelerator, folder: Path, differs: bool) -> None:
    handle = accelerator.register_load_state_pre_hook(failing) if differs else None
    try:
        accelerator.load_state(folder)
    finally:
        if handle is not None:
            handle.remove()


def load_hook_takes_a_model(accelerator: Accelerator, folder: Path, differs: bool) -> None:
    handle = accelerator.register_load_state_pre_hook(lambda models, folder: models.clear() if differs else None)
    try:
        accelerator.load_state(folder)
    finally:
        handle.remove()


def model_fails(accelerator: Accelerator, folder: Path, differs: bool) -> None:
    (model,) = (accelerator.unwrap_model(one) for one in accelerator.prepared.models)
    assert isinstance(model, Fragile)
    model.broken = differs
    try:
        accelerator.load_state(folder)
    finally:
        model.broken = False


def another_object_is_registered(accelerator: Accelerator, folder: Path, differs: bool) -> None:
    if differs:
        accelerator.register_for_checkpointing(Counted())
    try:
        accelerator.save_state(folder)
    finally:
        accelerator.prepared.custom.clear()


CALLS: dict[str, tuple[Callable[[Accelerator, Path, bool], object], str]] = {
    "a load hook fails": (load_hook_fails, "no such config"),
    "a load hook is there, and fails": (load_hook_of_one_fails, "no such config"),
    "a load hook takes a model": (load_hook_takes_a_model, r"models \[\] to load on rank 0 and \[0\] on rank 1"),
    "the state of a model fails": (model_fails, "broken"),
    "another object": (another_object_is_registered, "only one of rank 0 and rank 1 has custom"),
    "in the background": (
        lambda accelerator, folder, differs: accelerator.save_state(folder, asynchronous=differs),
        "on rank 0 with asynchronous=True and on rank 1 with asynchronous=False",
    ),
    "metadata": (
        lambda accelerator, folder, differs: accelerator.save_state(folder, metadata=7 if differs else {}),
        r"metadata=7\): expected JSON values by name",
    ),
    "a place to save": (
        lambda accelerator, folder, differs: accelerator.save_state(7 if differs else folder),
        "7 is of type int; expected a folder as text or as a path",
    ),
    "an empty place to save": (
        lambda accelerator, folder, differs: accelerator.save_state("" if differs else folder),
        "'' names no folder; expected one as text or as a path",
    ),
    "a place to load": (
        lambda accelerator, folder, differs: accelerator.load_state(bytes(folder) if differs else folder),
        "expected a folder as text or as a path; nearest: '/",
    ),
    "no place to load": (
        lambda accelerator, folder, differs: accelerator.load_state(None if differs else folder),
        "No input_dir provided",
    ),
    "parts": (
        lambda accelerator, folder, differs: accelerator.load_state(folder, parts=7 if differs else None),
        r"parts=7\): expected names of parts",
    ),
}


@pytest.mark.ranks(2)
def test_a_call_that_differs_on_one_rank_fails_on_all(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Fragile(2, 2))
    accelerator.save_state(tmp_path / "saved")
    before = [one.detach().clone() for one in model.parameters()]
    for name, (call, message) in CALLS.items():
        with pytest.raises((AccelError, OSError, KeyError), match=message):
            call(accelerator, tmp_path / "saved", rank == 0)
        accelerator.save_state(tmp_path / "saved")
        accelerator.load_state(tmp_path / "saved")
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True)), name


@pytest.mark.ranks(2)
def test_hooks_of_one_rank_are_called(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    seen: list[str] = []
    if accelerator.is_main_process:
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: Path(folder, "config.json").write_text("{}")
        )
        accelerator.register_load_state_pre_hook(
            lambda models, folder: seen.append(Path(folder, "config.json").read_text())
        )
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    assert seen == ([] if rank else ["{}"])


@pytest.mark.parametrize("place", [b"runs/a", 7, "runs\0a", 1.5, "runs\ud800a"])
def test_a_place_that_is_no_path_is_refused_by_name(place: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError, match=r"runs.*nearest: 'runs/?a'|of type \w+; expected|no path has"):
            call(place)
    for name in ("project_dir", "logging_dir"):
        with pytest.raises(ConfigError, match=f"{name}: .*(nearest|no path has)"):
            ProjectConfiguration(**{name: place})


def test_no_place_and_the_working_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save replaces its target, so the process, and all that it opens later by a relative path, would be nowhere."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "a")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    for call in (accelerator.save_state, accelerator.load_state, lambda place: accelerator.save_model(model, place)):
        with pytest.raises(CheckpointError, match="'' names no folder; expected one"):
            call("")
    for place in (".", "..", tmp_path / "runs", Path.cwd()):
        with pytest.raises(
            CheckpointError, match=r"working directory, or holds it.* give a folder in it: .*/checkpoint"
        ):
            accelerator.save_state(place)
    assert list(Path.cwd().iterdir()) == []
    accelerator.save_state("checkpoint")
    accelerator.load_state("checkpoint")
