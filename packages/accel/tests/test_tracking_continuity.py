"""A run that is killed and resumed goes on as the same run: each step once, none missing, in each tool's own files."""

import csv
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_testing.launching import run_command

STEPS = 24
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from accel import Accelerator, ProjectConfiguration
from accel.tracking import QueueOptions

folder, trackers, kill_at, interval, early = sys.argv[1], sys.argv[2].split(","), *map(float, sys.argv[3:6])

accelerator = Accelerator(cpu=True, log_with=trackers, project_config=ProjectConfiguration(
    project_dir=folder, automatic_checkpoint_naming=True))
model = torch.nn.Linear(4, 1)
model = accelerator.prepare(model)
queue = QueueOptions(interval=interval, patience=120)
if early:
    accelerator.init_trackers("run", {"lr": 0.01, "net": {"width": 4}}, queue=queue)
start = 0
if Path(folder, "checkpoints").exists():
    accelerator.load_state("latest")
    start = 8 * accelerator.save_iteration
if not early:
    accelerator.init_trackers("run", {"lr": 0.01, "net": {"width": 4}}, queue=queue)
for step in range(start, 24):
    loss = model(torch.full((2, 4), step / 24)).square().mean()
    accelerator.backward(loss)
    for parameter in model.parameters():
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None
    accelerator.log({"loss": loss, "lr": 0.01}, step=step)
    if step % 4 == 3:
        accelerator.log({"eval": float(step)}, step=step)
    if step == kill_at:
        if interval < 1:  # until the tools have it
            while not any(f"\\n{step}," in table.read_text() for table in Path(folder, "run").glob("*/metrics.csv")):
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 8 == 7:
        accelerator.save_state()
accelerator.end_training()
"""


def csv_steps(folder: Path) -> dict[str, list[int]]:
    (path,) = folder.glob("run/*/metrics.csv")
    rows = list(csv.DictReader(path.open(newline="")))
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})
    return {name: [int(row["step"]) for row in rows if row[name]] for name in ("loss", "eval")}


def tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    return {name: [event.step for event in events.Scalars(name)] for name in ("loss", "eval")}


def mlflow_steps(folder: Path) -> dict[str, list[int]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("run")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"lr": "0.01", "net.width": "4"}
    return {
        name: [metric.step for metric in client.get_metric_history(run.info.run_id, name)] for name in ("loss", "eval")
    }


READERS = {"csv": csv_steps, "tensorboard": tensorboard_steps, "mlflow": mlflow_steps}
# Killed between log and save, with everything delivered or nothing (0.02 s or 1000 s between deliveries), once or
# twice, with trackers made ready before the checkpoint is loaded or after.
LIVES = [
    pytest.param([(9, 0.02), (21, 1000.0)], False, id="twice"),
    pytest.param([(13, 0.02)], True, id="delivered", marks=pytest.mark.slow),
    pytest.param([(13, 1000.0)], True, id="not-delivered", marks=pytest.mark.slow),
    pytest.param([(16, 0.02), (16, 1000.0)], True, id="twice-at-one-step", marks=pytest.mark.slow),
]


def lives(folder: Path, trackers: str, kills: list[tuple[int, float]], early: bool) -> Iterator[int]:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    if trackers == "mlflow":  # a database that a kill left half made is a matter of MLflow's
        words = "import mlflow; mlflow.MlflowClient().search_experiments()"
        run_command([sys.executable, "-c", words], cwd=folder, env=env, timeout=120).check()
    for kill_at, interval in [*kills, (-1, 0.02)]:
        words = [sys.executable, script, folder, trackers, str(kill_at), str(interval), str(int(early))]
        yield run_command(words, cwd=folder, env=env, timeout=120).status


@pytest.mark.fault
@pytest.mark.parametrize("trackers", ["csv,tensorboard", "mlflow"])
@pytest.mark.parametrize(("kills", "early"), LIVES)
def test_killed_and_resumed_each_step_is_there_once(
    trackers: str, kills: list[tuple[int, float]], early: bool, tmp_path: Path
) -> None:
    for name in trackers.replace("csv", "accel").split(","):
        pytest.importorskip(name)
    statuses = list(lives(tmp_path, trackers, kills, early))
    assert statuses == [-signal.SIGKILL] * len(kills) + [0]
    for name in trackers.split(","):
        found = READERS[name](tmp_path)
        assert found["loss"] == list(range(STEPS)), name
        assert found["eval"] == list(range(3, STEPS, 4)), name
