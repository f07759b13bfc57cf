import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt import CheckpointDirectory, Retention, keep_all, keep_best, keep_every, keep_last, keep_union
from accel_ckpt.io.atomic_folder import Staging, sweep
from accel_ckpt.io.local import LocalStorage
from accel_ckpt.series import directory
from accel_state.errors import CheckpointError
from accel_testing.faults.faults import small_file_system


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_numbers_go_on_and_sort_as_numbers(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path / "deep" / "er", retention=keep_last(2))
    for number in range(12):
        assert series.save({"n": number}).path.name == f"checkpoint_{number}"
    assert names(series.path) == ["checkpoint_10", "checkpoint_11"]
    latest = series.latest()
    assert latest is not None
    assert latest.read("n") == 11
    assert CheckpointDirectory(series.path).next_path().name == "checkpoint_12"


def test_a_checkpoint_that_cannot_be_removed_stays_and_saving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    series = CheckpointDirectory(tmp_path / "series", retention=keep_last(1))
    first = series.save({"n": 0}).path
    assert isinstance(first, Path)
    shutil.copytree(first, tmp_path / "copy")
    with ExitStack() as stack:
        try:
            stack.enter_context(small_file_system(first))  # the system renames no mount point
        except PermissionError as error:
            pytest.skip(str(error))
        shutil.copytree(tmp_path / "copy", first, dirs_exist_ok=True)
        for number in (1, 2):
            series.save({"n": number})
        assert "checkpoint_0: cannot be removed: " in caplog.text
        assert names(series.path) == ["checkpoint_0", "checkpoint_2"]
    series.save({"n": 3})
    assert names(series.path) == ["checkpoint_3"]


def test_policies_compose_over_a_run(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path, retention=keep_union(keep_last(1), keep_every(4), keep_best("loss")))
    for loss in (5, 1, 4, 3, 2, 6):
        series.save({}, metadata={"loss": loss})
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_4", "checkpoint_5"]
    assert [entry.metadata["loss"] for entry in series.entries()] == [5, 1, 2, 6]


@pytest.mark.parametrize(("retention", "looked_at"), [(keep_all(), 0), (keep_last(3), 4)])
def test_a_save_looks_at_no_checkpoint_that_is_kept_anyway(
    retention: Retention, looked_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save into a series of ten thousand took 1.5 s of processor time for the others."""
    series = CheckpointDirectory(tmp_path, retention=retention)
    for number in range(8):
        series.save({"n": number})
    seen: set[str] = set()
    for method in ("names", "listing"):
        original = getattr(LocalStorage, method)
        monkeypatch.setattr(
            LocalStorage, method, lambda self, place, own=original: seen.add(place.name) or own(self, place)
        )
    series.save({"n": 8})
    assert len(seen & {f"checkpoint_{number}" for number in range(9)} - {"checkpoint_8"}) <= looked_at


def test_the_newest_intact_one_is_found_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(4):
        series.save({"t": torch.full((10,), number)})
    os.truncate(tmp_path / "checkpoint_3" / "tensors-00000.safetensors", 10)
    (tmp_path / "checkpoint_2" / "manifest.json").write_text("{}")
    latest = series.latest()
    assert latest is not None
    assert latest.read("t")[0] == 1
    assert "passing over checkpoint_3" in caplog.text
    assert "tensors-00000.safetensors: 10 bytes, but" in caplog.text
    assert "passing over checkpoint_2" in caplog.text


def test_an_empty_or_missing_folder_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path).latest() is None
    assert CheckpointDirectory(tmp_path / "nowhere").latest() is None
    assert CheckpointDirectory(tmp_path / "nowhere").entries() == []
    assert CheckpointDirectory(tmp_path / "nowhere").sweep() == []


def test_the_last_intact_one_outlives_any_policy(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(4):
        series.save({"n": number})
    for number in (2, 3):
        (tmp_path / f"checkpoint_{number}" / "tree.json").unlink()
    CheckpointDirectory(tmp_path, retention=keep_last(1)).prune()
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path, retention=keep_last(1))
    series.save({"n": 0})
    with pytest.raises(CheckpointError):
        series.save({"n": object()})
    assert names(tmp_path) == ["checkpoint_0"]


def test_clocks_and_file_times_decide_nothing(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(3):
        series.save({"n": number})
        for entry in (tmp_path / f"checkpoint_{number}").iterdir():
            os.utime(entry, (4e9 - number * 1e9, 4e9 - number * 1e9))
        os.utime(tmp_path / f"checkpoint_{number}", (4e9 - number * 1e9, 4e9 - number * 1e9))
    latest = series.latest()
    assert latest is not None
    assert latest.read("n") == 2


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_7").mkdir()
    (tmp_path / "checkpoint_07").mkdir()
    (tmp_path / "checkpoint_x").write_text("")
    (tmp_path / ".notes.staging").mkdir()
    (tmp_path / "checkpoint_9").symlink_to(tmp_path)
    series = CheckpointDirectory(tmp_path, retention=keep_last(1))
    assert series.save({"n": 1}).path.name == "checkpoint_10"
    series.sweep()
    assert [entry.number for entry in series.entries()] == [10]
    assert names(tmp_path) == [
        ".notes.staging", "checkpoint_07", "checkpoint_10", "checkpoint_7", "checkpoint_9", "checkpoint_x",
    ]  # fmt: skip


def test_leftovers_are_swept_but_not_those_of_a_writer_that_lives(tmp_path: Path) -> None:
    alive = Staging(tmp_path / "checkpoint_1", overwrite=False)
    dead = Staging(tmp_path / "checkpoint_2", overwrite=False)
    (tmp_path / dead.folder.name / "half").write_text("x")
    os.close(dead._handle)  # type: ignore[arg-type]  # what the operating system does when a process ends
    removed = CheckpointDirectory(tmp_path).sweep()
    assert [path.name for path in removed] == [dead.folder.name]
    assert alive.folder.is_dir()
    alive.drop()
    assert names(tmp_path) == []


def test_a_killed_overwrite_by_two_renames_is_put_back(tmp_path: Path) -> None:
    CheckpointDirectory(tmp_path).save({"n": 5})
    aside = tmp_path / ".checkpoint_0.0123456789abcdef.replaced"
    (tmp_path / "checkpoint_0").rename(aside)
    os.utime(aside, (0, 0))
    sweep(tmp_path)
    latest = CheckpointDirectory(tmp_path).latest()
    assert latest is not None
    assert latest.read("n") == 5


@pytest.mark.ranks(2)
def test_all_ranks_agree_on_numbers_and_on_the_latest(tmp_path: Path, rank: int) -> None:
    series = CheckpointDirectory(tmp_path, retention=keep_last(2))
    for number in range(3):
        assert series.save({"n": number}, local={"rank": rank}).path.name == f"checkpoint_{number}"
    latest = series.latest()
    assert latest is not None
    assert latest.read_local("rank", rank) == rank
    torch.distributed.barrier()
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transaction", range(10))
@pytest.mark.sampled(3)
def test_what_was_saved_is_there_for_both_ranks_at_once(tmp_path: Path, rank: int, transaction: int) -> None:
    """Nobody waits for the other between saving and loading; each writes one of the tensors that both read."""
    series = CheckpointDirectory(tmp_path)
    saved = series.save({"model": [torch.full((200, 200), float(transaction + half)) for half in range(2)]})
    files = {name for name in saved.manifest.files if name.startswith("tensors")}
    assert len(files) == 2
    read = saved.read("model")
    latest = series.latest()
    assert latest is not None
    assert latest.path == saved.path
    for found in (read, latest.read("model")):
        assert [value.unique().tolist() for value in found] == [[transaction], [transaction + 1]]


def test_a_save_reads_no_more_manifests_the_more_checkpoints_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = CheckpointDirectory(tmp_path, retention=keep_last(8))
    read: list[str] = []
    known = directory.read_manifest

    def read_manifest(path: Path) -> Any:
        read.append(path.name)
        return known(path)

    monkeypatch.setattr(directory, "read_manifest", read_manifest)
    counts = []
    for number in range(12):
        read.clear()
        series.save({"n": number}, metadata={"loss": number})
        counts.append(len(read))
    assert len(set(counts[2:])) == 1
    assert [entry.metadata["loss"] for entry in series.entries()] == [*range(4, 12)]


def test_what_is_saved_while_the_listed_are_pruned_is_found(tmp_path, monkeypatch):
    series = CheckpointDirectory(tmp_path, retention=keep_last(1))
    for value in range(2):
        series.save({"model": {"w": torch.full((2,), float(value))}})
    listed = CheckpointDirectory._committed
    calls = []

    def then_pruned(self):
        found = listed(self)
        calls.append(found)
        if len(calls) == 1:
            monkeypatch.setattr(CheckpointDirectory, "_committed", listed)
            series.save({"model": {"w": torch.full((2,), 2.0)}})
        return found

    monkeypatch.setattr(CheckpointDirectory, "_committed", then_pruned)
    assert series.latest().path.name == "checkpoint_2"


def test_a_save_removes_what_killed_saves_to_the_same_place_left(tmp_path):
    for name in (".c.0123456789abcdef.staging", ".other.0123456789abcdef.staging"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    accel_ckpt.save(tmp_path / "c", {"model": {"w": torch.ones(2)}})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.0123456789abcdef.staging", "c"]


def test_a_checkpoint_that_was_moved_and_linked_stays_in_its_series(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path / "series", retention=keep_last(2))
    series.save({"a": {"x": torch.ones(2)}})
    moved = (tmp_path / "series/checkpoint_0").rename(tmp_path / "elsewhere")
    (tmp_path / "series/checkpoint_0").symlink_to(moved)
    latest = series.latest()
    assert latest is not None
    assert latest.path.name == "checkpoint_0"
    assert not series.is_empty()
    for _ in range(2):
        series.save({"a": {"x": torch.ones(2)}})
    assert sorted(entry.name for entry in (tmp_path / "series").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert (moved / "manifest.json").exists(), "pruning removes the link only"


@pytest.mark.parametrize("thing", ["file", "dangling link"])
def test_a_name_that_is_taken_by_something_else_is_passed_over(tmp_path: Path, thing: str) -> None:
    series = CheckpointDirectory(tmp_path / "series")
    series.save({"a": {"x": torch.ones(2)}})
    taken = tmp_path / "series/checkpoint_1"
    taken.write_text("mine") if thing == "file" else taken.symlink_to(tmp_path / "nowhere")
    assert series.save({"a": {"x": torch.ones(2)}}).path.name == "checkpoint_2"


def test_links_that_lead_nowhere_and_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    """They take their numbers, and neither a save nor a resume fails because of them."""
    (tmp_path / "checkpoint_5").symlink_to("checkpoint_5")
    (tmp_path / "checkpoint_6").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "checkpoint_7")
    (tmp_path / "checkpoint_8").write_text("")
    (tmp_path / os.fsdecode(b"checkpoint_\xe9")).write_text("")
    series = CheckpointDirectory(tmp_path, retention=keep_last(1))
    assert series.is_empty()
    assert series.latest() is None
    for number in (9, 10):
        assert series.save({"n": number}).path == tmp_path / f"checkpoint_{number}"
    latest = series.latest()
    assert latest is not None
    assert latest.read("n") == 10
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at|is no folder"):
        accel_ckpt.open_checkpoint(tmp_path / "checkpoint_5")
    assert CheckpointDirectory(tmp_path / "checkpoint_5").is_empty()
