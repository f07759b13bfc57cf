"""Launches on TPUs as far as a machine without one can tell: plans, refusals, and what gcloud is given."""

import os
import sys
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from accel_launch.config import resolve_config
from accel_launch.launch.dispatch import prepare
from accel_launch.launch.remote.tpu import pod_commands
from accel_state.errors import BackendError, ConfigError, LaunchError
from accel_testing.programs.runs import run_command

POD = {"tpu": True, "tpu_cluster": True, "tpu_name": "pod", "tpu_zone": "here"}
TWO = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "first", "main_process_port": 29500}
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
    assert made["processes"][0]["argv"][1:4] == ["-P", "-m", "accel_launch.launch.child_main"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_processes": 8}, "num_processes is 8 .* one process drives all TPU cores .* num_processes 1"),
        ({"num_machines": 2}, "2 machines need main_process_ip"),
        ({**TWO, "num_processes": 8}, "num_processes is 8 .* say num_processes 2"),
        ({**TWO, "num_machines": 1, "nnodes": "1:2"}, "the machines of a TPU pod neither come nor go; say 2"),
        ({**POD, "num_machines": 2}, "each machine of a pod knows how many they are"),
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
        planned(tmp_path, **{"tpu": True, **settings})


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_a_machine_without_torch_xla_says_so(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('this would train on the CPU')")
    done = run_command([sys.executable, "-m", "accel", "launch", "--tpu", "train.py"], cwd=tmp_path, timeout=120)
    assert done.status == 2
    assert "torch_xla is not installed here" in done.output
    assert "torch_xla==" in done.output


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_the_backend_without_torch_xla_says_so():
    from accel import Accelerator

    with pytest.raises(BackendError, match=r"backend 'xla' needs XLA devices.*: install torch_xla, .*torch_xla=="):
        Accelerator(cpu=True, strategy="xla")


# ---------------------------------------------------------------------------------------------- machines of a pod

VARIABLES = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2"}
FACTS = {"worker-network-endpoints": "a:1:t-0,b:2:t-1,c:3:t-2", "tpu-env": "ACCELERATOR_TYPE: 'v4-24'\nWORKER_ID: '1'"}


@contextmanager
def metadata(facts):
    """A server like the one that machines of Google ask for their own attributes, as a variable of the environment."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            folder, _, name = self.path.rpartition("/")
            known = folder == "/computeMetadata/v1/instance/attributes" and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known and name in facts else 404)
            self.end_headers()
            self.wfile.write(facts.get(name, "").encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("source", ["variables", "metadata"])
@pytest.mark.parametrize("settings", [{}, {"num_machines": 3}, {"num_processes": 1}, {"num_processes": 3}])
def test_a_machine_of_a_pod_finds_its_place(tmp_path, source, settings):
    with nullcontext(VARIABLES) if source == "variables" else metadata(FACTS) as launcher:
        made = planned(tmp_path, launcher, tpu=True, **settings)
    assert made["machine"] == {"rank": 1, "of": 3, "at_least": 3}
    assert made["main_process"] == {"address": "t-0", "port": 29500}
    (process,) = made["processes"]
    assert {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "t-0",
        "PJRT_DEVICE": "TPU",
    }.items() <= process["env"].items()


def test_a_place_that_is_given_wins(tmp_path):
    made = planned(tmp_path, VARIABLES, tpu=True, **TWO)
    assert made["machine"] == {"rank": 1, "of": 2, "at_least": 2}
    assert made["main_process"] == {"address": "first", "port": 29500}
    made = planned(tmp_path, VARIABLES, tpu=True, main_process_ip="other", main_process_port=4000)
    assert made["machine"]["rank"] == 1
    assert made["main_process"] == {"address": "other", "port": 4000}


@pytest.mark.parametrize(
    "facts", [{}, {"worker-network-endpoints": "a:1:10.0.0.1", "tpu-env": "WORKER_ID: '0'"}], ids=["no TPU", "one"]
)
def test_a_machine_that_is_no_part_of_a_pod_is_alone(tmp_path, facts):
    with metadata(facts) as launcher:
        assert planned(tmp_path, launcher, tpu=True)["num_processes"] == 1
    with metadata(FACTS) as launcher:
        assert planned(tmp_path, {**launcher, "TPU_SKIP_MDS_QUERY": "1"}, tpu=True)["num_processes"] == 1
        assert planned(tmp_path, launcher, num_processes=1)["num_processes"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_machines": 2}, "num_machines is 2, but this TPU pod has 3 machines"),
        ({"nnodes": "1:3"}, "nnodes is 1:3, but this TPU pod has 3 machines"),
        ({"num_processes": 12}, "num_processes is 12 .* say num_processes 3"),
    ],
)
def test_other_numbers_than_the_pods_are_refused(tmp_path, settings, words):
    with pytest.raises(LaunchError, match=words):
        planned(tmp_path, VARIABLES, tpu=True, **settings)


def test_a_machine_that_does_not_know_its_place_says_so(tmp_path):
    asked = pytest.raises(LaunchError, match=r"one of 3 machines .* give --machine_rank and --main_process_ip")
    with metadata({"worker-network-endpoints": FACTS["worker-network-endpoints"]}) as launcher, asked:
        planned(tmp_path, launcher, tpu=True)
    with pytest.raises(LaunchError, match=r"cannot ask .*attributes/worker-network-endpoints"):  # it is gone
        planned(tmp_path, launcher, tpu=True)


# ---------------------------------------------------------------------------------------------- pods, from elsewhere


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
    assert "each finds its own" in made["on_each"]["place"]
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
    from accel_launch.cli.app import run

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
    from accel_launch.cli.app import command_line

    with pytest.raises(ConfigError, match=words):
        command_line().main(["tpu-config", *argv], "accel", standalone_mode=False)


def test_a_file_for_tpu_config_serves_launches_without_a_pod(tmp_path):
    (tmp_path / "settings.yaml").write_text("tpu_name: pod\ntpu_zone: here\ncommands: [ls]\n")
    (tmp_path / "train.py").write_text("")
    config = resolve_config({}, {}, str(tmp_path / "settings.yaml"))
    assert "processes" in prepare(config, [str(tmp_path / "train.py")], {}).plan.to_json()
