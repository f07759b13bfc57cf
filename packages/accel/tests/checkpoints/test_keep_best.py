"""The best checkpoints by a metric are kept; bad input is refused, and never removes a checkpoint."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_ckpt import open_checkpoint
from accel_ckpt.series import directory
from accel_launch.cli.app import run
from accel_state.errors import CheckpointError, ConfigError
from accel_testing.pytest.logs import heard


def made(folder: Path | str, **rules: Any) -> Accelerator:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **rules)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(2, 2))
    return accelerator


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("_")[2]) for path in (folder / "checkpoints").iterdir())


LOSSES = (0.5, 0.2, 0.9, 0.3, 0.8, 0.7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_best": 2, "metric": "loss"}, [1, 3, 5]),
        ({"keep_best": 2, "metric": "loss", "mode": "max"}, [2, 4, 5]),
        ({"keep_best": 1, "metric": "loss", "total_limit": 2}, [1, 4, 5]),
        ({"total_limit": 2}, [4, 5]),
    ],
)
@pytest.mark.sampled(2)
def test_the_best_are_kept_beside_the_newest(
    tmp_path: Path, rank: int, rules: dict[str, Any], kept: list[int], asynchronous: bool
) -> None:
    accelerator = made(tmp_path, **rules)
    for loss in LOSSES:  # the main process's values count; the others may have none
        accelerator.save_state(metrics=None if rank else {"loss": torch.tensor(loss)}, asynchronous=asynchronous)
    accelerator.end_training()
    assert numbers(tmp_path) == kept
    with open_checkpoint(tmp_path / "checkpoints" / "checkpoint_5") as saved:
        assert saved.metadata["metrics"] == {"loss": pytest.approx(0.7)}


def test_one_process_keeps_the_best(tmp_path: Path) -> None:
    accelerator = made(tmp_path, keep_best=2, metric="eval.loss")
    for loss in LOSSES:
        accelerator.save_state(metrics={"eval.loss": loss, "step": 3})
    assert numbers(tmp_path) == [1, 3, 5]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"keep_best": 2}, "keep_best=2 needs a metric"),
        ({"metric": "loss"}, "metric='loss' has no effect without keep_best"),
        ({"keep_best": 0, "metric": "loss"}, "at least 1 checkpoint"),
        ({"keep_best": 1.5, "metric": "loss"}, "keep_best is 1.5; expected a whole number"),
        ({"total_limit": "3"}, "total_limit is '3'; expected a whole number"),
        ({"iteration": "3"}, "iteration is '3'; expected a whole number"),
        ({"keep_best": 2, "metric": "loss", "mode": "least"}, "mode is 'least'; expected 'min' or 'max'"),
        ({"keep_best": 2, "metric": "loss", "automatic_checkpoint_naming": False}, "automatic_checkpoint_naming=True"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_when_it_is_made(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProjectConfiguration("somewhere", **{"automatic_checkpoint_naming": True, **rules})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"los": 0.5}, r"has no 'loss' \(nearest: 'los'\), by which the best 2"),
        ({"loss": "low"}, "'loss' is 'low'; expected a number"),
        ({"loss": True}, "'loss' is True; expected a number"),
        ({"loss": torch.ones(2)}, "expected a number"),
        ([0.5], "expected numbers by name"),
    ],
)
def test_metrics_that_are_none_are_refused_on_all_ranks_and_nothing_is_saved(
    tmp_path: Path, rank: int, metrics: Any, words: str
) -> None:
    accelerator = made(tmp_path, keep_best=2, metric="loss")
    accelerator.save_state(metrics={"loss": 1.0})
    with pytest.raises((ConfigError, CheckpointError), match=words):
        accelerator.save_state(metrics=None if rank else metrics)
    accelerator.wait_for_everyone()
    assert numbers(tmp_path) == [0]
    accelerator.save_state(metrics={"loss": 2.0})
    accelerator.wait_for_everyone()
    assert numbers(tmp_path) == [0, 1]


def test_what_was_not_measured_is_not_removed_by_the_best(tmp_path: Path) -> None:
    accelerator = made(tmp_path, keep_best=1, metric="loss")
    with heard("accel") as said:
        for _ in range(3):
            accelerator.save_state()
    assert numbers(tmp_path) == [0, 1, 2]
    assert len([one for one in said if "save_state without metrics" in one]) == 1
    for loss in (0.4, 0.5, 0.6):
        accelerator.save_state(metrics={"loss": loss})
    assert numbers(tmp_path) == [0, 1, 2, 3, 5]


def test_nan_is_never_the_best_and_said(tmp_path: Path) -> None:
    accelerator = made(tmp_path, keep_best=1, metric="loss")
    accelerator.save_state(metrics={"loss": 3.0})
    with heard("accel") as said:
        accelerator.save_state(metrics={"loss": math.nan})
        accelerator.save_state(metrics={"loss": 4.0})
    assert numbers(tmp_path) == [0, 2]
    assert len([one for one in said if "'loss' is nan" in one]) == 1


def test_a_manifest_that_cannot_be_read_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = made(tmp_path, keep_best=1, metric="loss")
    accelerator.save_state(metrics={"loss": 1.0})
    accelerator.save_state(metrics={"loss": 2.0})
    known = directory.read_manifest

    def read_manifest(place: Path) -> Any:
        if place.name == "checkpoint_0":
            raise CheckpointError("the store does not answer")
        return known(place)

    monkeypatch.setattr(directory, "read_manifest", read_manifest)
    with heard("accel_ckpt") as said:
        accelerator.save_state(metrics={"loss": 3.0})
    assert numbers(tmp_path) == [0, 1, 2]
    assert any("no checkpoint is removed this time" in one for one in said)
    monkeypatch.undo()
    accelerator.save_state(metrics={"loss": 4.0})
    assert numbers(tmp_path) == [0, 3]
    accelerator.end_training()  # what was logged holds it until the test is over


def test_a_save_reads_the_manifests_of_those_that_are_kept_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    known = directory.read_manifest

    def read_manifest(place: Path) -> Any:
        read.append(place.name)
        return known(place)

    monkeypatch.setattr(directory, "read_manifest", read_manifest)
    counts: dict[str, list[int]] = {}
    for name, rules in {
        "newest": {"total_limit": 50},
        "best": {"total_limit": 2, "keep_best": 3, "metric": "n"},
    }.items():
        accelerator = made(tmp_path / name, **rules)
        for number in range(20):
            read.clear()
            accelerator.save_state(metrics={"n": float(number)})
            counts.setdefault(name, []).append(len(read))
    assert len(set(counts["newest"][2:])) == 1  # however many there are
    assert len(set(counts["best"][6:])) == 1
    assert counts["best"][-1] <= 2 + 3 + 2


@pytest.fixture
def series(tmp_path: Path) -> Path:
    accelerator = made(tmp_path)
    for loss in LOSSES[:4]:
        accelerator.save_state(metrics={"loss": loss})
    accelerator.save_state()
    accelerator.save_state(metrics={"loss": 1.0})
    return tmp_path / "checkpoints"


def shown(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    capsys.readouterr()
    status = run(["ckpt", *map(str, argv)])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_commands_know_metrics(
    series: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, text = shown(capsys, "ls", series)
    assert status == 0
    assert ["loss=0.5" in line for line in text.splitlines()[1:]] == [True, *[False] * 5]
    rows = json.loads(shown(capsys, "ls", series, "--json")[1])
    assert rows[1]["metadata"]["metrics"] == {"loss": 0.2}
    status, text = shown(capsys, "prune", series, "--keep_best", 2, "--metric", "loss")
    assert (status, len(os.listdir(series))) == (0, 6)
    assert [line.split() for line in text.splitlines()[1:7]] == [
        ["checkpoint_0", "0.5", "would", "go"],
        ["checkpoint_1", "0.2", "stays"],
        ["checkpoint_2", "0.9", "would", "go"],
        ["checkpoint_3", "0.3", "stays"],
        ["checkpoint_4", "stays"],
        ["checkpoint_5", "1", "stays"],
    ]
    arguments = ("prune", series, "--keep_best", 1, "--metric", "loss", "--mode", "max", "--keep_last", 2, "--yes")
    assert shown(capsys, *arguments)[0] == 0
    assert numbers(series.parent) == [4, 5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--keep_best", "2"], "belong together"),
        (["--metric", "loss"], "belong together"),
        (["--keep_last", "2", "--mode", "max"], "belong together"),
        (["--keep_best", "2", "--metric", "los"], "(nearest: loss); there are loss"),
        (["--keep_best", "0", "--metric", "loss"], "would keep nothing"),
    ],
)
def test_commands_refuse_rules_that_cannot_work(
    series: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    status, text = shown(capsys, "prune", series, *options, "--yes")
    assert (status, len(os.listdir(series))) == (2, 6)
    assert words in " ".join(text.replace("│", " ").split())
