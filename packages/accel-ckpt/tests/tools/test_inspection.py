import math
import os
from pathlib import Path

import pytest
import torch

from accel_ckpt import CheckpointDirectory, keep_last, save
from accel_ckpt.tools.inspection import Changed, compare_checkpoints, describe, list_checkpoints, verify


@pytest.fixture
def series(tmp_path: Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path)
    tied = torch.ones(2, 3)
    for number in range(3):
        weight = torch.full((4,), 2.0 + (0.5 if number == 2 else 0))
        model = {"w": weight, "head": tied, "embedding": tied, "only": torch.ones(number)}
        made.save({"model": model, "step": {"n": number, "lr": 0.1}}, metadata={"loss": 1 / (number + 1)})
    return made


def test_a_series_is_listed_with_what_is_damaged(series: CheckpointDirectory) -> None:
    os.truncate(series.path / "checkpoint_1" / "manifest.json", 50)
    listed = list_checkpoints(series.path)
    assert [(entry.number, entry.world_size, entry.metadata) for entry in listed] == [
        (0, 1, {"loss": 1.0}), (1, 0, {}), (2, 1, {"loss": 1 / 3}),
    ]  # fmt: skip
    assert [entry.problem is None for entry in listed] == [True, False, True]
    assert "not sealed" in str(listed[1].problem)


def test_a_checkpoint_that_was_moved_and_linked_is_listed(series: CheckpointDirectory, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    (series.path / "checkpoint_1").rename(moved)
    (series.path / "checkpoint_1").symlink_to(moved)
    (series.path / "checkpoint_7").symlink_to(tmp_path / "nowhere")
    listed = list_checkpoints(series.path)
    assert [(entry.number, entry.problem) for entry in listed][:3] == [(0, None), (1, None), (2, None)]
    assert [entry.number for entry in listed[3:]] == [None], "the moved one under its own name"


def test_checkpoints_with_names_of_their_own_are_listed_too(series: CheckpointDirectory) -> None:
    save(series.path / "epoch_1", {"model": {}})
    (series.path / "notes").mkdir()
    (series.path / "checkpoint_2" / "manifest.json").unlink()
    listed = list_checkpoints(series.path)[2:]
    assert [(entry.number, entry.path.name) for entry in listed] == [(2, "checkpoint_2"), (None, "epoch_1")]
    assert "has no manifest.json" in str(listed[0].problem)
    assert listed[1].problem is None


def test_a_checkpoint_is_described_without_reading_tensors(series: CheckpointDirectory) -> None:
    folder = series.path / "checkpoint_0"
    (folder / "tensors-00000.safetensors").unlink()
    model, step = describe(folder)
    assert [(tensor.place, tensor.shape, tensor.nbytes, tensor.parts) for tensor in model.tensors] == [
        ("w", (4,), 16, 1), ("head", (2, 3), 24, 1), ("embedding", (2, 3), 24, 1), ("only", (0,), 0, 0),
    ]  # fmt: skip
    assert (step.name, step.values) == ("step", {"n": 0, "lr": 0.1})
    assert "tensors-00000.safetensors: the file is missing" in str(verify(folder))
    assert verify(series.path / "checkpoint_1") is None


def test_what_changed_between_two_is_named_and_measured(series: CheckpointDirectory) -> None:
    found = compare_checkpoints(series.path / "checkpoint_1", series.path / "checkpoint_2")
    changed, reshaped = found.tensors
    assert changed == Changed("model/w", 0.5, 0.25)
    assert reshaped.reason == "float32 (1,) became float32 (2,)"
    assert found.values == {"step/n": (1, 2)}
    assert found.same == 3
    assert (found.only_first, found.only_second) == ((), ())


def test_pruning_is_planned_without_removing(series: CheckpointDirectory) -> None:
    os.truncate(series.path / "checkpoint_2" / "tree.json", 1)
    assert [
        entry.number for entry in CheckpointDirectory(series.path, retention=keep_last(1)).surplus(thorough=True)
    ] == [0]
    assert len(os.listdir(series.path)) == 3


@pytest.mark.parametrize(
    ("first", "second", "largest", "relative"),
    [
        (torch.zeros(3), torch.tensor([0.0, -2.0, 0.0]), 2.0, math.inf),
        (torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2) * (1 + 3j), 3.0, 3.0),
        (torch.tensor(7), torch.tensor(14), 7.0, 1.0),
        (torch.ones(2) > 0, torch.ones(2) < 0, 1.0, 1.0),
        (torch.ones(2), torch.tensor([1.0, math.nan]), math.nan, math.nan),
    ],
)
def test_distances_are_measured_in_slices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: torch.Tensor,
    second: torch.Tensor,
    largest: float,
    relative: float,
) -> None:
    monkeypatch.setattr("accel_ckpt.tools.inspection._SLICE", 1)
    save(tmp_path / "a", {"s": {"x": first}})
    save(tmp_path / "b", {"s": {"x": second}})
    (changed,) = compare_checkpoints(tmp_path / "a", tmp_path / "b").tensors
    assert changed.largest == pytest.approx(largest, nan_ok=True)
    assert changed.relative == pytest.approx(relative, nan_ok=True)
