"""Launches on TPUs as far as a machine without one can tell: plans, refusals, and what gcloud is given."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel.config import resolve_config
from accel.launch.starting import prepare
from accel.launch.tpu import pod_commands
from accel_state.errors import ConfigError, LaunchError
from accel_testing.launching import run_command

POD = {"tpu": True, "tpu_cluster": True, "tpu_name": "pod", "tpu_zone": "here"}
GCLOUD = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "here", "--command"]


def planned(tmp_path, launcher=(), **settings):
    script = tmp_path / "train.py"
    script.write_text("")
    return prepare(resolve_config(settings, {}), [str(script), "--lr", "1"], dict(launcher)).plan.to_json()


@pytest.mark.parametrize(
    ("settings", "launcher", "variables"),
    [
        ({}, {}, {"PJRT_DEVICE": "TPU", "WORLD_SIZE": "1"}),
        ({"num_processes": 1}, {"PJRT_DEVICE": "CPU"}, {"PJRT_DEVICE": "CPU"}),
        ({"env": "A=1, B=x=y"}, {}, {"A": "1", "B": "x=y"}),
        ({"env": "PJRT_DEVICE=CPU"}, {"PJRT_DEVICE": "TPU"}, {"PJRT_DEVICE": "CPU"}),
        ({"mixed_precision": "bf16"}, {}, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ({"mixed_precision": "bf16", "downcast_bf16": True}, {}, {"ACCELERATE_MIXED_PRECISION": "bf16-true"}),
    ],
)
def test_one_process_has_all_cores_of_a_machine(tmp_path, settings, launcher, variables):
    made = planned(tmp_path, launcher, tpu=True, **settings)
    (process,) = made["processes"]
    assert process["argv"] == [sys.executable, str(tmp_path / "train.py"), "--lr", "1"]
    assert variables.items() <= process["env"].items()
    assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & process["env"].keys()


def test_what_a_launcher_does_besides_holds_on_tpus_too(tmp_path):
    made = planned(tmp_path, tpu=True, max_restarts=2, prefix_output=True)
    assert made["max_restarts"] == 2
    assert made["processes"][0]["argv"][1:4] == ["-P", "-m", "accel.launch.worker"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_processes": 8}, "num_processes is 8 .* one process drives all TPU cores .* num_processes 1"),
        ({"num_machines": 2}, "num_machines|main_process_ip"),
        ({"gpu_ids": "0,1"}, "gpu_ids is '0,1'; drop gpu_ids"),
        ({"downcast_bf16": True}, "downcast_bf16 means nothing with mixed_precision 'no'"),
        ({"env": "A"}, "env has 'A'; expected NAME=value"),
        ({"tpu_cluster": True}, "tpu_cluster needs tpu_name and tpu_zone"),
        ({"tpu_name": "pod"}, "tpu_name .* means nothing without --tpu_cluster"),
        ({"tpu_cluster": True, "tpu_name": "a", "tpu_zone": "b", "command_file": "absent"}, "command_file 'absent'"),
    ],
)
def test_settings_that_cannot_work_on_tpus_are_refused(tmp_path, settings, words):
    with pytest.raises(LaunchError, match=words):
        planned(tmp_path, tpu=True, **settings)


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_a_machine_without_torch_xla_says_so(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('this would train on the CPU')")
    done = run_command([sys.executable, "-m", "accel", "launch", "--tpu", "train.py"], cwd=tmp_path, timeout=120)
    assert done.status == 2
    assert "torch_xla is not installed here" in done.output
    assert "torch_xla==" in done.output


# ----------------------------------------------------------------------------------------------------------- pods


def test_a_pod_gets_the_same_launch_on_each_machine(tmp_path):
    (tmp_path / "first").write_text("cd work\n\nls -l, x\n")
    made = planned(
        tmp_path,
        **POD,
        vm="0,2",
        env="A=1",
        mixed_precision="bf16",
        downcast_bf16=True,
        command_file=str(tmp_path / "first"),
        commands="echo a,b; date",
        tpu_use_sudo=True,
    )
    assert made["argv"][: len(GCLOUD)] == GCLOUD
    text, *rest = made["argv"][len(GCLOUD) :]
    assert rest == ["--worker", "0,2"]
    *before, launch = text.split("; ")
    assert before == ["cd work", "ls -l, x", "echo a,b", "date"]
    assert launch == (
        "sudo python3 -m accel launch --mixed_precision bf16 --tpu --env A=1 --downcast_bf16 "
        f"{tmp_path / 'train.py'} --lr 1"
    )
    assert made["workers"] == ["0", "2"]
    (process,) = made["on_each"]["processes"]
    assert process["argv"] == ["python3", str(tmp_path / "train.py"), "--lr", "1"]
    assert {"PJRT_DEVICE": "TPU", "A": "1", "ACCELERATE_MIXED_PRECISION": "bf16-true"}.items() <= process["env"].items()
    assert "tpu_name" not in process["env"]["ACCEL_CONFIG"]


def test_the_script_may_be_on_the_pod_only():
    made = prepare(resolve_config(dict(POD), {}), ["elsewhere.py"], {}).plan
    assert made.to_json()["workers"] == ["all"]
    assert "elsewhere.py" in str(made)


def test_commands_of_a_file_are_taken_one_by_one(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("tpu: true\ntpu_use_cluster: true\ncommands:\n  - echo $(date)\n  - ls 1,2\n")
    assert pod_commands(resolve_config({}, {}, str(file))) == ["echo $(date)", "ls 1,2"]


GCLOUD_STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > called
exit 3
"""


def with_gcloud(folder):
    """Variables with a ``gcloud`` that writes down what it was given and ends with status 3."""
    (folder / "bin").mkdir()
    (folder / "bin" / "gcloud").write_text(GCLOUD_STAND_IN)
    (folder / "bin" / "gcloud").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "argv",
    [
        ["launch", "--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "here", "train.py"],
        ["tpu-config", "--tpu_name", "pod", "--tpu_zone", "here", "--command", "ls"],
    ],
)
def test_gcloud_is_run_and_its_status_is_ours(argv, tmp_path):
    env = with_gcloud(tmp_path)
    done = run_command([sys.executable, "-m", "accel", *argv], env=env, cwd=tmp_path, timeout=120)
    assert done.status == 3
    given = (tmp_path / "called").read_text().splitlines()
    assert given[: len(GCLOUD) - 1] == GCLOUD[1:]
    assert given[len(GCLOUD) :] == ["--worker", "all"]


def test_without_gcloud_the_command_is_said(tmp_path):
    argv = [sys.executable, "-m", "accel", "tpu-config", "--tpu_name", "a", "--tpu_zone", "z", "--command", "ls"]
    done = run_command(argv, env={"PATH": str(tmp_path)}, cwd=tmp_path, timeout=120)
    assert done.status == 2
    assert "cannot run 'gcloud', which is not installed here; it would be: gcloud compute tpus" in done.output


# ----------------------------------------------------------------------------------------------- accel tpu-config

BASE = "Running gcloud compute tpus tpu-vm ssh test-tpu --zone us-central1-a --command cd /usr/share; "


@pytest.fixture
def said(capsys):
    from accel.cli.app import run

    def call(*argv):
        assert run(["tpu-config", *argv, "--debug"]) == 0
        return capsys.readouterr().out.strip()

    return call


PLACE = ("--tpu_name", "test-tpu", "--tpu_zone", "us-central1-a")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--command", "ls"], "ls --worker all"),
        (["--command", "ls", "--command", 'echo "Hello"'], 'ls; echo "Hello" --worker all'),
        (["--command", "ls", "--install_accelerate"], "pip install accelerate -U; ls --worker all"),
        (
            ["--command", "ls", "--install-accelerate", "--accelerate-version", "0.12.0"],
            "pip install accelerate==0.12.0; ls --worker all",
        ),
        (
            ["--command", "ls", "--install_accelerate", "--accelerate_version", "dev"],
            "pip install git+https://github.com/huggingface/accelerate.git; ls --worker all",
        ),
    ],
)
def test_commands_for_a_pod_are_shown(said, argv, expected):
    assert said(*PLACE, *argv) == BASE + expected


def test_gclouds_alpha_commands_can_be_used(said):
    assert said(*PLACE, "--command", "ls", "--use_alpha").startswith("Running gcloud alpha compute tpus")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "first; second"),
        (["--command", "typed"], "typed"),
        (["--command_file", "more"], "of a file"),
        (["--tpu_zone", "us-central1-a"], "first; second"),
    ],
)
def test_what_was_typed_wins_over_the_file(said, tmp_path, monkeypatch, argv, expected):
    monkeypatch.chdir(tmp_path)
    Path("more").write_text("of a file\n")
    Path("file.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\ntpu_name: test-tpu\ntpu_zone: us-central1-a\n"
        "commands:\n  - first\n  - second\n"
    )
    assert said("--config_file", "file.yaml", *argv) == f"{BASE}{expected} --worker all"


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--command", "ls"], "--tpu_name and --tpu_zone"), (PLACE, "give --command or --command_file")],
)
def test_a_pod_and_a_command_are_needed(argv, words):
    from accel.cli.app import command_line

    with pytest.raises(ConfigError, match=words):
        command_line().main(["tpu-config", *argv], "accel", standalone_mode=False)
