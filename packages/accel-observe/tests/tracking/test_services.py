"""Every tracker against its real library, offline, read back from the files that the library wrote.

Each library is imported in a process of its own: they patch what they find. Aim's files could not be read back in any
way that was tried, so its test shows no more than that it accepts everything.
"""

import io
import json
import signal
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from accel_testing.programs.runs import run_command

TRAINING = Path(__file__).with_name("tracked_training.py")
pytestmark = pytest.mark.timeout(1200)
SCRIPT = """
import sys
import torch
from accel import Accelerator

name, folder, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
accelerator.init_trackers("project", {"lr": 0.1, "net": {"width": 8}}, {name: options})
image = torch.stack(torch.broadcast_tensors(torch.arange(8)[:, None] * 32, torch.arange(8) * 16, torch.tensor(128)), -1)
image = image[None].to(torch.uint8)  # N x H x W x C
for step in range(3):
    accelerator.log({"loss": torch.tensor(1 / (step + 1)), "eval_acc": step / 4, "test": {"acc": 0.5}}, step=step)
if name == "aim":
    accelerator.log_images({"samples": (image[0].numpy(), "caption")}, step=2)
else:
    accelerator.log_images({"samples": image, "floats": image.flip(1).permute(0, 3, 1, 2) / 255}, step=2)
accelerator.log_table("table", columns=["a", "b"], data=[[1, 2], [3, 4]], step=2)
accelerator.log_artifact(__file__)
lane = accelerator._log.tracking.lane_of(name)
own = accelerator.get_tracker(name, unwrap=True)
assert own is not None
accelerator.end_training()
print("STATE", lane.state_dict()["state"], "REFUSED", lane._refused, "PROBLEM", lane.problem)
assert lane.problem is None, lane.problem
assert lane._refused == 0
"""
LOSSES = [1.0, 0.5, 1 / 3]
POINTS = [(step, pytest.approx(loss)) for step, loss in enumerate(LOSSES)]


def tracked(name: str, folder: Path, options: str = "{}", **env: str) -> str:
    """What the script printed, after all was taken without trouble."""
    _need(name)
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_command([sys.executable, script, name, folder, options], cwd=folder, env=env, timeout=300)
    return done.check().output


def assert_shown(files: Iterable[Path | BinaryIO], off_by: float = 0) -> None:
    """The files are the script's two pictures, each number right within ``off_by`` on average."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:8, :8]
    expected = np.stack([rows * 32, columns * 16, np.full((8, 8), 128)], -1)
    found = [np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files]
    assert [picture.shape for picture in found] == [(8, 8, 3)] * 2
    for picture in (expected, expected[::-1]):
        assert min(np.abs(picture - other).mean() for other in found) <= off_by


def _need(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; hatch run trackers:test has it")


def test_tensorboard(tmp_path: Path) -> None:
    tracked("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (journal,) = tmp_path.glob("project/*/run.jsonl")
    events = EventAccumulator(str(journal.parent))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(LOSSES)
    assert [event.step for event in events.Scalars("eval_acc")] == [0, 1, 2]
    written = [event for name in ("samples", "floats") for event in events.Images(name)]
    assert [event.step for event in written] == [2, 2]
    assert_shown(io.BytesIO(event.encoded_image_string) for event in written)
    assert "_hparams_/session_start_info" in events.summary_metadata
    (written,) = journal.parent.glob("*/hparams.yml")
    assert "width: 8" in written.read_text()


def test_mlflow(tmp_path: Path) -> None:
    tracked("mlflow", tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/m.db")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/m.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(LOSSES)
    ]
    assert run.data.params == {"lr": "0.1", "net.width": "8"}
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"samples", "script.py", "table.json"}
    assert_shown(tmp_path.rglob("*.png"))


def test_wandb(tmp_path: Path) -> None:
    tracked("wandb", tmp_path, repr({"dir": str(tmp_path)}), WANDB_MODE="offline", WANDB_SILENT="true")
    (log,) = tmp_path.glob("wandb/offline-run*/run-*.wandb")
    history, config = wandb_records(log)
    assert [row["loss"] for row in history if "loss" in row] == pytest.approx(LOSSES)
    assert [row["_step"] for row in history if "loss" in row] == [0, 1, 2]
    assert config["lr"] == 0.1
    assert config["net"] == {"width": 8}
    assert_shown(tmp_path.glob("wandb/offline-run*/files/media/images/*.png"))
    assert list(tmp_path.glob("wandb/offline-run*/files/media/table/*.json"))


def wandb_records(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History and configuration in an offline log: LevelDB's format, 7 bytes of header, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as messages

    history, config = [], {}
    for data in _leveldb_records(path.read_bytes()[7:], 7):
        record = messages.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.append(row)
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        for item in updates:
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return history, config


def _leveldb_records(data: bytes, offset: int) -> Iterator[bytes]:
    position, parts = 0, b""
    while position + 7 <= len(data):
        left = 32768 - (position + offset) % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if length == 0 and kind == 0:
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_comet(tmp_path: Path) -> None:
    tracked("comet_ml", tmp_path, "{'online': False}", COMET_OFFLINE_DIRECTORY=str(tmp_path), COMET_MODE="create")
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        messages = [json.loads(line) for line in files.read("messages.json").decode().splitlines()]
        contents = map(files.read, files.namelist())
        assert_shown(io.BytesIO(content) for content in contents if content.startswith(b"\x89PNG"))
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = [(metric["step"], float(metric["metricValue"])) for metric in metrics if metric["metricName"] == "loss"]
    assert losses == POINTS
    assert "test/acc" in {metric["metricName"] for metric in metrics}
    assert "0.1" in json.dumps([message["payload"] for message in messages if message["type"] == "parameter_msg"])


def test_clearml(tmp_path: Path) -> None:
    frameworks = "{'detect_repository': False}"  # looking through the repository takes longer than the rest
    options = f"{{'auto_connect_frameworks': {frameworks}, 'auto_resource_monitoring': False}}"
    tracked("clearml", tmp_path, options, CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path), HOME=str(tmp_path))
    (written,) = tmp_path.rglob("metrics.jsonl")
    lines = [entry for line in written.read_text().splitlines() for entry in json.loads(line)]
    losses = [(entry["iter"], entry["value"]) for entry in lines if entry.get("metric") == "loss"]
    assert losses == POINTS
    assert {entry["variant"] for entry in lines if entry.get("metric") == "acc"} == {"eval"}
    task = json.loads(written.with_name("task.json").read_text())
    assert task["configuration"]["General"]["value"].split() == ["lr", "=", "0.1", "net", "{", "width", "=", "8", "}"]
    assert [kept["key"] for kept in task["execution"]["artifacts"]] == ["script.py"]
    assert_shown(tmp_path.rglob("*.jpeg"), off_by=12)


def test_dvclive(tmp_path: Path) -> None:
    tracked("dvclive", tmp_path, "{'save_dvc_exp': False, 'dvcyaml': None, 'report': None}")
    rows = (tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()[1:]
    assert [float(row.split()[-1]) for row in rows] == pytest.approx(LOSSES)
    assert [int(row.split()[-2]) for row in rows] == [0, 1, 2]
    assert "width: 8" in (tmp_path / "dvclive" / "params.yaml").read_text()
    assert_shown((tmp_path / "dvclive" / "plots" / "images").rglob("*.png"))


def test_swanlab(tmp_path: Path) -> None:
    """Scalars are in a binary file of SwanLab's that is not read here; configuration and image are."""
    tracked("swanlab", tmp_path, repr({"mode": "offline", "logdir": str(tmp_path / "sl")}), HOME=str(tmp_path))
    assert any("width" in path.read_text() for path in (tmp_path / "sl").rglob("config.yaml"))
    assert_shown((tmp_path / "sl").rglob("*.png"))


def test_trackio(tmp_path: Path) -> None:
    import sqlite3

    tracked("trackio", tmp_path, "{'embed': False}", TRACKIO_DIR=str(tmp_path / "tio"), HF_HUB_OFFLINE="1")
    (database,) = (tmp_path / "tio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step, id").fetchall()
    losses = [(step, json.loads(text)["loss"]) for step, text in rows if "loss" in json.loads(text)]
    assert losses == POINTS
    assert_shown((tmp_path / "tio").rglob("*.png"))


def test_aim(tmp_path: Path) -> None:
    assert "run_hash" in tracked("aim", tmp_path)


def taken_up_again(name: str, folder: Path, init: dict[str, Any], **env: str) -> None:
    """A run that ended when it had saved after 8 steps; one that went on and was killed; and one that went on to 24."""
    _need(name)
    deeds = ({"stop_at": 7}, {"kill_at": 13, "interval": 1000.0}, {})
    for deed in deeds:
        words = [sys.executable, TRAINING, folder, name, json.dumps({**deed, "init": {name: init}})]
        status = run_command(words, cwd=folder, env=env, timeout=300).status
        assert status == (-signal.SIGKILL if "kill_at" in deed else 0)


def test_wandb_goes_on_with_its_run(tmp_path: Path) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    taken_up_again("wandb", tmp_path, {"dir": str(tmp_path)}, **env)
    first, second = sorted(tmp_path.glob("wandb/offline-run*/run-*.wandb"))
    assert first.name == second.name  # the run's id
    steps = [[row["_step"] for row in wandb_records(log)[0] if "loss" in row] for log in (first, second)]
    assert steps == [list(range(8)), list(range(8, 24))]


def test_comet_goes_on_with_its_experiment(tmp_path: Path) -> None:
    env = {"COMET_OFFLINE_DIRECTORY": str(tmp_path), "COMET_MODE": "create"}
    taken_up_again("comet_ml", tmp_path, {"online": False}, **env)
    archives = sorted(tmp_path.glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len({path.name.partition("-")[0].removesuffix(".zip") for path in archives}) == 1  # the experiment's key
    steps = []
    for archive in archives:
        with zipfile.ZipFile(archive) as files:
            messages = [json.loads(line)["payload"] for line in files.read("messages.json").decode().splitlines()]
        metrics = [payload["metric"] for payload in messages if "metric" in payload]
        steps.append([metric["step"] for metric in metrics if metric["metricName"] == "loss"])
    assert steps == [list(range(8)), list(range(8, 24))]


def test_swanlab_goes_on_with_its_run(tmp_path: Path) -> None:
    """Its scalars are not read here; the run's id is in the names of its folders."""
    taken_up_again("swanlab", tmp_path, {"mode": "offline", "logdir": str(tmp_path / "sl")}, HOME=str(tmp_path))
    logs = list((tmp_path / "sl").rglob("*.swanlab"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1


def test_a_dead_endpoint_holds_nothing_up_and_is_told_once(tmp_path: Path) -> None:
    """Nobody listens on port 9: the library itself tries for minutes, and the run ends when its patience does."""
    _need("mlflow")
    script = tmp_path / "script.py"
    script.write_text(
        "import logging\nfrom accel import Accelerator\nfrom accel_observe.tracking import QueueOptions\n"
        "logging.basicConfig()\n"
        "accelerator = Accelerator(cpu=True, log_with='mlflow', project_dir='.')\n"
        "accelerator.init_trackers('p', {'lr': 1}, queue=QueueOptions(patience=3))\n"
        "for step in range(100):\n    accelerator.log({'loss': 1.0}, step=step)\n"
        "accelerator.end_training()\nprint('TRAINED')\n"
    )
    env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    said = run_command([sys.executable, script], cwd=tmp_path, env=env, timeout=300).check().output
    assert "TRAINED" in said
    assert said.count("tracker mlflow ended with trouble") == 1
    (waiting,) = tmp_path.glob("p/*/undelivered-mlflow.jsonl")
    assert len(waiting.read_text().splitlines()) == 100


def test_two_runs_of_a_project_are_two_in_tensorboard(tmp_path: Path) -> None:
    _need("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    from accel import Accelerator

    for value in (1.0, 2.0):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        accelerator.init_trackers("project")
        accelerator.log({"loss": value}, step=0)
        accelerator.end_training()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "project")).Reload()
    assert sorted(runs.Scalars(run, "loss")[0].value for run in runs.Runs()) == [1.0, 2.0]
    assert set(runs.Runs()) == {path.parent.name for path in tmp_path.glob("project/*/run.jsonl")}


def test_tensorboard_draws_the_numbers_of_nested_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from accel import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"eval": {"loss": 0.5, "by_class": {"cat": 1.0}, "note": "text"}}, step=1)
    accelerator.log({"loss": 0.25}, step=2)
    accelerator.end_training()
    (folder,) = (path.parent for path in tmp_path.glob("project/*/run.jsonl"))
    for tag, place, value in [("loss", ".", 0.25), ("eval", "eval_loss", 0.5), ("eval", "eval_by_class/cat", 1.0)]:
        events = EventAccumulator(str(folder / place))
        events.Reload()
        assert [event.value for event in events.Scalars(tag)] == [value]


def test_tensorboard_has_nested_values_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from accel import Accelerator

    for steps in (range(4), range(2, 5)):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        accelerator.init_trackers("p")
        if steps[0]:
            accelerator.load_state(tmp_path / "c")
        for step in steps:
            accelerator.log({"net": {"width": float(step)}}, step=step)
            if step == 1:
                accelerator.save_state(tmp_path / "c")
        accelerator.end_training()
    (folder,) = tmp_path.glob("p/*/net_width")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("net")] == [(step, float(step)) for step in range(5)]
