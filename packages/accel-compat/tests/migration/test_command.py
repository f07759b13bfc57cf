"""The command ``accel migrate``: exit status, report, and what it writes."""

import json
from pathlib import Path

import pytest

from accel_launch.cli.app import run

RENAME, CHANGE, NOTE = (
    "from accelerate import Accelerator\n",
    "accelerator.save_model(m, d, safe_serialization=False)\n",
    "accelerator.save_state(d)\n",
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "a" / "script.py"


@pytest.mark.parametrize(
    ("text", "words", "status"),
    [
        ("x = 1\n", [], 0),
        (RENAME, [], 1),
        (RENAME, ["--write"], 0),
        (CHANGE, ["--write"], 1),
        (NOTE, [], 0),
        (NOTE, ["--strict"], 1),
        ("def\n", [], 2),
        ("x = '\udcff'\n", [], 2),
    ],
)
def test_the_status_says_what_is_left(script, text, words, status):
    script.parent.mkdir()
    script.write_bytes(text.encode(errors="surrogateescape"))
    assert run(["migrate", *words, str(script)]) == status


def test_a_folder_is_reported_by_line_and_summed_up(script, capsys):
    script.parent.mkdir()
    script.write_text(RENAME + CHANGE + NOTE)
    hidden = script.parent / ".venv" / "site-packages"
    hidden.mkdir(parents=True)
    (hidden / "other.py").write_text(CHANGE)
    assert run(["migrate", str(script.parent.parent)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" [")[0] for line in lines[:-1]] == [
        f"{script}:1:1: rename",
        f"{script}:2:1: change",
        f"{script}:3:1: note",
    ]
    assert lines[-1] == "1 file: 1 import to rename with --write, 1 to change by hand, 1 note"
    assert script.read_text() == RENAME + CHANGE + NOTE


def test_write_renames_and_leaves_nothing_to_rename(script, capsys):
    script.parent.mkdir()
    script.write_text(RENAME + NOTE)
    assert run(["migrate", str(script), "--write"]) == 0
    assert f"{script}: renamed the imports" in capsys.readouterr().out
    assert script.read_text() == "from accel import Accelerator\n" + NOTE
    assert run(["migrate", str(script)]) == 0
    assert "0 imports to rename" in capsys.readouterr().out


def test_json_has_every_field(script, capsys):
    script.parent.mkdir()
    script.write_text(CHANGE)
    assert run(["migrate", str(script), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    (finding,) = report.pop("findings")
    assert report == {"path": str(script), "renamed": False, "error": None}
    assert finding["remedy"].startswith("leave it out")
    assert {key: finding[key] for key in ("line", "column", "kind", "rule")} == {
        "line": 1,
        "column": 1,
        "kind": "change",
        "rule": "unsafe-model",
    }


def test_a_folder_without_scripts_is_an_error(tmp_path, capsys):
    assert run(["migrate", str(tmp_path)]) == 2
    assert f"{tmp_path} has no files that end in .py" in capsys.readouterr().err
    assert run(["migrate", str(tmp_path / "none.py")]) == 2
    assert "none.py does not exist" in capsys.readouterr().err
