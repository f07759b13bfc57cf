"""The ``accelerate`` command under Accelerate's names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import accel_compat
from accel_compat.commands.command_line import launch_words, run_command
from accel_compat.commands.config_files import load_config_from_file
from accel_launch.cli.env import accelerate_in_use


def accelerate_in(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel.compat", "-m", f"accelerate.commands.{module}", *words]
    env = os.environ | {"HF_HOME": str(folder)}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        (["a.py", "--x"], {}, ["a.py", "--x"]),
        (["--multi_gpu", "--num_processes", "2", "a.py"], {}, ["--multi_gpu", "--num_processes", "2", "a.py"]),
        (["--multi_gpu", "a.py"], {"ACCELERATE_USE_CPU": "true"}, ["a.py"]),
        (["a.py", "--multi_gpu"], {"ACCELERATE_USE_CPU": "true"}, ["a.py", "--multi_gpu"]),
    ],
)
def test_launch_is_that_of_accel_with_compat(tmp_path, words, env, expected):
    assert launch_words(words, env | {"HF_HOME": str(tmp_path)}) == ["launch", "--compat", *expected]


def test_the_written_defaults_are_the_settings_of_launches(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert run_command(["config", "default", "--mixed_precision", "bf16"]) == 0
    written = tmp_path / "accelerate" / "default_config.yaml"
    assert f"saved at {written}" in capsys.readouterr().out
    assert "mixed_precision: bf16" in written.read_text()
    assert launch_words(["a.py"], os.environ)[2:4] == ["--config_file", str(written)]
    own = ["--num-processes=1", "a.py", "--config_file", "mine.yaml"]
    assert launch_words(own, os.environ)[2:] == ["--config_file", str(written), *own]
    named = ["--config-file", "named.yaml", "a.py"]
    assert launch_words(named, os.environ)[2:] == named
    assert run_command(["config", "default"]) == 0
    assert "already exists" in capsys.readouterr().out
    config = load_config_from_file(None)
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", 1, True)


def test_an_unknown_precision_of_the_defaults_is_refused(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    assert run_command(["config", "default", "--config_file", str(path), "--mixed_precision", "int8"]) == 2
    assert "'int8'" in capsys.readouterr().err
    assert not path.exists()


def test_a_launched_program_resolves_accelerate_to_accel(tmp_path):
    (tmp_path / "script.py").write_text("import accelerate\nprint(accelerate.__version__, accelerate.__file__)\n")
    done = accelerate_in(tmp_path, "launch", "--cpu", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.15.0 ")
    assert "accel_compat" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_test_command_trains_in_all_processes(tmp_path, processes):
    done = accelerate_in(tmp_path, "accelerate_cli", "test", "--cpu", "--num_processes", processes)
    assert done.returncode == 0, done.stderr
    assert f"{processes} processes on cpu: weights as in one process" in done.stdout
    assert "Test is a success" in done.stdout


def test_env_names_the_release_and_what_offers_it(capsys):
    assert run_command(["env"]) == 0
    assert "`Accelerate` version: 1.15.0, offered by accel-compat" in capsys.readouterr().out


def test_env_of_accel_says_which_is_in_use():
    assert accelerate_in_use().startswith("1.15.0, offered by accel-compat; under accel launch --compat: accel-compat ")
    accel_compat.uninstall()
    assert not accelerate_in_use().startswith("1.15.0, offered by accel-compat")


def test_help_lists_the_commands(capsys):
    assert run_command(["--help"]) == 0
    assert "launch" in capsys.readouterr().out
