"""A run that is killed and resumed goes on as the same run: each step once, none missing, in each tool's own files."""

import csv
import json
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from accel_testing.programs.runs import run_command

TRAINING = Path(__file__).with_name("tracked_training.py")
STEPS = 24
NAMES = ("loss", "net/lr", "eval")


def csv_steps(folder: Path) -> dict[str, list[int]]:
    (path,) = folder.glob("run/*/metrics.csv")
    rows = list(csv.DictReader(path.open(newline="")))
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})
    return {name: [int(row["step"]) for row in rows if row[name]] for name in NAMES}


def tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = {path.parent for path in folder.glob("run/*/events.out.tfevents.*")}
    events = EventAccumulator(str(run))
    events.Reload()
    return {name: [event.step for event in events.Scalars(name)] for name in ("loss", "eval")}


def mlflow_steps(folder: Path) -> dict[str, list[int]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("run")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"lr": "0.01", "net.width": "4"}
    return {name: [metric.step for metric in client.get_metric_history(run.info.run_id, name)] for name in NAMES}


def dvclive_steps(folder: Path) -> dict[str, list[int]]:
    tables = {name: folder / "dvclive" / "plots" / "metrics" / f"{name}.tsv" for name in NAMES}
    return {name: [int(row.split()[0]) for row in path.read_text().splitlines()[1:]] for name, path in tables.items()}


def trackio_steps(folder: Path) -> dict[str, list[int]]:
    import sqlite3

    (database,) = (folder / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics, run_name from metrics order by id").fetchall()
    assert len({name for _, _, name in rows}) == 1
    values = [(step, json.loads(text)) for step, text, _ in rows]
    return {name: [step for step, row in values if name in row] for name in ("loss", "eval")}


def clearml_steps(folder: Path) -> dict[str, list[int]]:
    (written,) = folder.rglob("metrics.jsonl")
    entries = [entry for line in written.read_text().splitlines() for entry in json.loads(line)]
    return {name: [entry["iter"] for entry in entries if entry.get("metric") == name] for name in NAMES}


READERS = {
    "csv": csv_steps,
    "tensorboard": tensorboard_steps,
    "mlflow": mlflow_steps,
    "dvclive": dvclive_steps,
    "trackio": trackio_steps,
    "clearml": clearml_steps,
}
LIBRARIES = {"csv": "accel"}
INIT: dict[str, dict[str, Any]] = {
    "dvclive": {"save_dvc_exp": False, "dvcyaml": None, "report": None},
    "trackio": {"embed": False},
    "clearml": {  # looking through the repository takes longer than the training
        "auto_connect_frameworks": {"detect_repository": False},
        "auto_resource_monitoring": False,
        "auto_connect_streams": False,
    },
}
# Killed between log and save, with everything delivered or nothing (0.02 s or 1000 s between deliveries), once or
# twice, with trackers made ready before the checkpoint is loaded or after.
LIVES = [
    pytest.param([(9, 0.02), (21, 1000.0)], False, id="twice"),
    pytest.param([(13, 0.02)], True, id="delivered", marks=pytest.mark.slow),
    pytest.param([(13, 1000.0)], True, id="not-delivered", marks=pytest.mark.slow),
    pytest.param([(16, 0.02), (16, 1000.0)], True, id="twice-at-one-step", marks=pytest.mark.slow),
]


def environment(folder: Path) -> dict[str, str]:
    """Where each library keeps its files, with no network."""
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(folder),
        "HOME": str(folder),
    }


def lives(folder: Path, trackers: str, kills: list[tuple[int, float]], early: bool) -> Iterator[int]:
    env = environment(folder)
    if trackers == "mlflow":  # a database that a kill left half made is a matter of MLflow's
        words = "import mlflow; mlflow.MlflowClient().search_experiments()"
        run_command([sys.executable, "-c", words], cwd=folder, env=env, timeout=300).check()
    for kill_at, interval in [*kills, (-1, 0.02)]:
        options = {"kill_at": kill_at, "interval": interval, "early": early, "init": INIT}
        words = [sys.executable, TRAINING, folder, trackers, json.dumps(options)]
        yield run_command(words, cwd=folder, env=env, timeout=300).status


@pytest.mark.fault
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trackers", ["csv,tensorboard", "mlflow", "dvclive", "trackio", "clearml"])
@pytest.mark.parametrize(("kills", "early"), LIVES)
@pytest.mark.sampled(2)
def test_killed_and_resumed_each_step_is_there_once(
    trackers: str, kills: list[tuple[int, float]], early: bool, tmp_path: Path
) -> None:
    for name in trackers.split(","):
        if find_spec(LIBRARIES.get(name, name)) is None:
            pytest.skip(f"{name} is not installed; hatch run trackers:test has it")
    statuses = list(lives(tmp_path, trackers, kills, early))
    assert statuses == [-signal.SIGKILL] * len(kills) + [0]
    expected = {"loss": list(range(STEPS)), "net/lr": list(range(STEPS)), "eval": list(range(3, STEPS, 4))}
    for name in trackers.split(","):
        found = READERS[name](tmp_path)
        assert found == {curve: expected[curve] for curve in found}, name
