"""``accel ckpt`` looks into checkpoints and tends them; its exit status tells damage from health."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from accel_ckpt import CheckpointDirectory, load_model_files, save
from accel_launch.cli.app import run
from accel_testing.faults.faults import small_file_system

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Three checkpoints of a model with a tied tensor; the second has another weight and step than the first."""
    folder = tmp_path / "checkpoints"
    made = CheckpointDirectory(folder)
    for number in range(3):
        tied = torch.ones(2, 3)
        model = {"w": torch.full((4,), 2.0 + min(number, 1)), "head": tied, "embedding": tied}
        state = {"model": model, "scheduler": {"last": number, "best": float("inf")}}
        made.save(state, local={"rng": {"seed": 1}}, metadata={"loss": 1 / (number + 1)})
    return folder


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command; gives its exit status and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*argv: object) -> tuple[int, str]:
        capsys.readouterr()
        status = run(["ckpt", *map(str, argv)])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return command


def data(answer: tuple[int, str]) -> object:
    return json.loads(answer[1])


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_listing_shows_every_checkpoint_and_ends_with_1_for_a_damaged_one(series: Path, ckpt: Command) -> None:
    save(series / "epoch_1", {"model": {}})
    status, text = ckpt("ls", series)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        *(f"checkpoint_{number}" for number in range(3)),
        "epoch_1",
    ]
    os.truncate(series / "checkpoint_1" / "manifest.json", 10)
    status, text = ckpt("ls", series, "--json")
    assert status == 1
    rows = json.loads(text)
    assert [row["problem"] is None for row in rows] == [True, False, True, True]
    assert rows[2]["metadata"] == {"loss": 1 / 3}


def test_listing_the_wrong_folder_says_where_checkpoints_are(series: Path, ckpt: Command) -> None:
    assert f"there are some in {series}" in ckpt("ls", series.parent)[1]
    assert "it is one itself" in ckpt("ls", series / "checkpoint_0")[1]
    assert ckpt("ls", series / "nothing")[0] == 2


def test_a_checkpoint_is_shown_without_its_tensors(series: Path, ckpt: Command) -> None:
    path = series / "checkpoint_0"
    (path / "tensors-00000.safetensors").unlink()
    status, text = ckpt("show", path)
    assert status == 0
    assert "model: 3 tensors, 64 B" in text
    assert any(line.split() == ["head", "float32", "2", "x", "3", "24", "B", "1"] for line in text.splitlines())
    shown = data(ckpt("show", path, "--name", "scheduler", "--json"))
    assert isinstance(shown, dict)
    assert shown["metadata"] == {"loss": 1.0}
    assert shown["states"] == [{"name": "scheduler", "tensors": [], "values": {"last": 0, "best": "inf"}}]
    assert "holds no 'modle'; it holds model, scheduler" in ckpt("show", path, "--name", "modle")[1]


def test_verifying_names_the_damaged_file_and_ends_with_1(series: Path, ckpt: Command) -> None:
    whole, broken = series / "checkpoint_0", series / "checkpoint_1"
    assert ckpt("verify", whole, broken)[0] == 0
    flip_last_byte(broken / "tensors-00000.safetensors")
    status, text = ckpt("verify", whole, broken)
    assert status == 1
    assert "tensors-00000.safetensors: bytes" in text
    rows = data(ckpt("verify", whole, broken, "--json"))
    assert isinstance(rows, list)
    assert [row["ok"] for row in rows] == [True, False]
    assert ckpt("verify", series / "checkpoint_9")[0] == 2


def test_differences_are_named_and_measured(series: Path, ckpt: Command) -> None:
    status, text = ckpt("diff", series / "checkpoint_0", series / "checkpoint_1", "--json")
    found = json.loads(text)
    assert status == 1
    assert found["tensors"] == [{"name": "model/w", "max_abs": 1.0, "relative": 0.5, "reason": None}]
    assert found["values"] == {"scheduler/last": {"first": 0, "second": 1}}
    assert ckpt("diff", series / "checkpoint_1", series / "checkpoint_1") == (
        0,
        "5 tensors and values are the same\n",
    )
    status, text = ckpt("diff", series / "checkpoint_0", series / "checkpoint_1")
    assert any(line.split() == ["model/w", "1", "0.5"] for line in text.splitlines())


@pytest.mark.parametrize("command", [["ckpt", "export"], ["merge-weights"]])
def test_a_model_is_exported_under_either_name(series: Path, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "out"
    assert run([*command, str(series / "checkpoint_1"), str(out)]) == 0
    loaded = load_model_files(out)
    assert loaded["w"].tolist() == [3.0] * 4
    assert loaded["head"] is loaded["embedding"]


def test_an_export_is_cut_into_files_of_the_wanted_size(series: Path, tmp_path: Path, ckpt: Command) -> None:
    files = data(ckpt("export", series / "checkpoint_0", tmp_path / "out", "--max-shard-size", "20", "--json"))
    assert isinstance(files, list)
    assert [Path(file["path"]).name for file in files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_nothing_is_pruned_without_yes(series: Path, ckpt: Command) -> None:
    status, text = ckpt("prune", series, "--keep-last", "1")
    assert (status, len(os.listdir(series))) == (0, 3)
    assert "add --yes" in text
    left = data(ckpt("prune", series, "--keep-last", "1", "--keep-every", "2", "--yes", "--json"))
    assert left == {
        "removed": [str(series / "checkpoint_1")],
        "kept": [str(series / f"checkpoint_{number}") for number in (0, 2)],
    }
    assert sorted(os.listdir(series)) == ["checkpoint_0", "checkpoint_2"]


def test_a_checkpoint_that_cannot_be_removed_is_named(series: Path, ckpt: Command, tmp_path: Path) -> None:
    shutil.copytree(series / "checkpoint_0", tmp_path / "copy")
    with ExitStack() as stack:
        try:
            stack.enter_context(small_file_system(series / "checkpoint_0"))  # the system renames no mount point
        except PermissionError as error:
            pytest.skip(str(error))
        shutil.copytree(tmp_path / "copy", series / "checkpoint_0", dirs_exist_ok=True)
        status, text = ckpt("prune", series, "--keep-last", "1", "--yes")
        assert status == 1
        assert "could not be removed: checkpoint_0" in text
        assert sorted(os.listdir(series)) == ["checkpoint_0", "checkpoint_2"]


def test_the_newest_complete_checkpoint_is_never_pruned(series: Path, ckpt: Command) -> None:
    flip_last_byte(series / "checkpoint_2" / "tensors-00000.safetensors")
    ckpt("prune", series, "--keep-last", "1", "--yes")
    assert sorted(os.listdir(series)) == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize(
    ("rules", "words"),
    [([], "say what to keep: --keep_last N"), (["--keep_last", "0"], "would keep nothing; give 1 or more")],
)
def test_pruning_needs_a_rule(series: Path, ckpt: Command, rules: list[str], words: str) -> None:
    status, text = ckpt("prune", series, *rules, "--yes")
    assert (status, len(os.listdir(series))) == (2, 3)
    assert words in text


def test_repairing_sweeps_leftovers_and_reports_damage(series: Path, ckpt: Command) -> None:
    leftover = series / ".checkpoint_3.0123456789abcdef.staging"
    leftover.mkdir()
    os.utime(leftover, (0, 0))
    assert data(ckpt("repair", series, "--json")) == {"swept": [leftover.name], "damaged": {}}
    assert not leftover.exists()
    flip_last_byte(series / "checkpoint_0" / "tree.json")
    (series / "checkpoint_1" / "manifest.json").unlink()
    status, text = ckpt("repair", series)
    assert status == 1
    assert "checkpoint_0: " in text
    assert "tree.json: bytes" in text
    assert "checkpoint_1: " in text
    assert "0 leftovers of killed saves, 2 damaged checkpoints" in text


def test_help_comes_without_torch() -> None:
    code = (
        "import sys\n"
        "from accel_launch.cli.app import run\n"
        "status = run(['ckpt', 'diff', '--help'])\n"
        "sys.exit(status or ('torch imported' if 'torch' in sys.modules else 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_checkpoint_is_written_in_another_number_of_files(series: Path, tmp_path: Path, ckpt: Command) -> None:
    source, target = series / "checkpoint_1", tmp_path / "other"
    facts = data(ckpt("reshard", source, target, "--files", "2", "--json"))
    assert isinstance(facts, dict)
    assert {name for name in facts["files"] if name.startswith("tensors")} == {
        "tensors-00000.safetensors",
        "tensors-00001.safetensors",
    }
    assert ckpt("diff", source, target)[0] == 0
    assert ckpt("reshard", source, target, "--files", "2")[0] == 2
    assert ckpt("reshard", source, tmp_path / "more", "--files", "0")[0] == 2


def test_every_command_takes_urls(series: Path, ckpt: Command) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    place = "memory://commands"
    for number in range(3):
        assert ckpt("reshard", series / f"checkpoint_{number}", f"{place}/checkpoint_{number}", "--files", "1")[0] == 0
    assert len(data(ckpt("ls", place, "--json"))) == 3  # type: ignore[arg-type]
    assert "scheduler" in ckpt("show", f"{place}/checkpoint_1")[1]
    assert ckpt("verify", f"{place}/checkpoint_1")[0] == 0
    assert ckpt("diff", f"{place}/checkpoint_0", series / "checkpoint_1")[0] == 1
    assert ckpt("prune", place, "--keep_last", "1", "--yes")[0] == 0
    assert data(ckpt("repair", place, "--json")) == {"swept": [], "damaged": {}}
    assert [row["number"] for row in data(ckpt("ls", place, "--json"))] == [2]  # type: ignore[attr-defined]
    assert ckpt("ls", "memory://nothing")[0] == 2
    files = data(ckpt("export", f"{place}/checkpoint_2", "memory://exported", "--json"))
    assert files == [{"path": "memory://exported/model.safetensors", "bytes": files[0]["bytes"]}]  # type: ignore[index]
    assert load_model_files("memory://exported")["w"].tolist() == [3.0] * 4
