"""Programs that are started for XLA devices: by the launcher, over a pod's machines, from a notebook, by hand."""

import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel import Accelerator, notebook_launcher
from accel_state import ConfigError
from accel_testing.launching import run_command

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]

SCRIPT = """
import os
import torch
from accel import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(8, 4, device=accelerator.device)).sum())
optimizer.step()
print(
    accelerator.device.type,
    accelerator.backend.num_devices,
    accelerator.num_processes,
    accelerator.mixed_precision,
    next(model.parameters()).dtype,
    os.environ.get("ASKED"),
)
accelerator.end_training()
"""
DEVICES = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}


def test_the_launcher_starts_one_process_with_all_devices(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--tpu", "--mixed_precision", "bf16", "--downcast_bf16", "--env", "ASKED=yes"]
    command = [sys.executable, "-m", "accel", "launch", *flags, "train.py"]
    done = run_command(command, env=DEVICES, cwd=tmp_path, timeout=300).check()
    assert "xla 2 1 bf16-true torch.bfloat16 yes" in done.output.splitlines()


# What gcloud does on a worker, done here: the command in a shell, in the folder that a login starts in.
GCLOUD_STAND_IN = """#!/bin/sh
while [ "$1" != "--command" ]; do shift; done
exec sh -c "$2"
"""


def test_a_launch_reaches_the_machine_of_a_pod(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "gcloud").write_text(GCLOUD_STAND_IN)
    (tools / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    pod = ["--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "here", "--commands", "export ASKED=before; date"]
    command = [sys.executable, "-m", "accel", "launch", "--tpu", "--max_restarts", "1", *pod, "train.py"]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = run_command(command, env={**DEVICES, "PATH": path}, cwd=tmp_path, timeout=300).check()
    assert "xla 2 1 no torch.float32 before" in done.output.splitlines()


def test_a_notebook_on_a_tpu_trains_in_its_own_process(on_devices):
    def body():
        def train(number):
            accelerator = Accelerator()
            found = accelerator.device.type, accelerator.backend.num_devices, accelerator.mixed_precision, number
            accelerator.end_training()
            return found, os.getpid()

        os.environ["TPU_NAME"] = "local"
        ((found, pid),) = notebook_launcher(train, (3,), mixed_precision="bf16")
        with pytest.raises(ConfigError, match="num_processes is 8: on a TPU one process, this one, drives all cores"):
            notebook_launcher(train, (3,), num_processes=8)
        return found, pid == os.getpid()

    assert on_devices(4, body) == (("xla", 4, "bf16", 3), True)


def test_the_page_about_xla_runs_as_shown(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "xla.md").read_text(encoding="utf-8")
    script = tmp_path / "xla_train.py"
    script.write_text(re.search(r"```python\n# xla_train.py\n(.*?)```", page, re.DOTALL)[1])
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = run_command([sys.executable, str(script)], env=variables, cwd=tmp_path, timeout=300).check()
    assert "xla 4 0" in done.output.splitlines()


PROGRAM = """
import torch
from accel_testing.models import SyntheticData, TinyMLP
from accel_testing.program import Program


def program():
    data = SyntheticData(24)
    batches = list(zip(data.x.split(8), data.y.split(8), strict=True))
    return Program(TinyMLP(), lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), batches)
"""


def test_accel_check_knows_layouts_of_xla(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "accel", "check", "script.py:program", "--layouts", "xla:4/fp32"]
    done = run_command(command, cwd=tmp_path, timeout=300).check()
    assert re.search(r"^xla:4/fp32 .* ok$", done.output, re.MULTILINE)
