"""Programs that are started for XLA devices: by the launcher, over a pod's machines, from a notebook, by hand."""

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator, notebook_launcher
from accel_backends import XLABackend
from accel_state import ConfigError
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from accel_testing.equivalence.programs import adamw
from accel_testing.programs.runs import run_command
from accel_testing.ranks.launchers import free_port

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]

SCRIPT = """
import os
import torch
from accel import Accelerator
from accel_backends import XLABackend

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(8, 4, device=accelerator.device)).sum())
optimizer.step()
print(
    accelerator.device.type,
    accelerator.native(XLABackend).num_devices,
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


def test_machines_of_a_pod_are_ranks_that_share_the_samples_the_weights_and_one_checkpoint(tmp_path):
    """All that a pod's machines do but computing as one, which CPU devices of several processes cannot."""
    command = [sys.executable, "-m", "accel", "launch", "--tpu", "--main_process_port", str(free_port())]
    told = {**DEVICES, "CPU_NUM_DEVICES": "1", "TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1"}
    machines = [told | {"TPU_WORKER_ID": number} for number in ("0", "1")]
    script = Path(__file__).with_name("pod_stand_in.py")
    run_command([*command, script, tmp_path], env=machines, cwd=tmp_path, timeout=300).check()
    first, second = found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["place"] for one in found] == [[0, 2, True], [1, 2, True]]
    assert first["rows"] == [[0, 1], [4, 5], [8, 9]]
    assert second["rows"] == [[2, 3], [6, 7], [0, 1]]
    for one in found:
        assert "2 processes were started on 2 machine(s), and XLA's runtime connects 1" in one["refusal"]
        assert one["metrics"] == list(range(10))
        assert (one["host"], one["first's"], one["objects"], one["trigger"]) == ([[0, 1], [1]], [0], [0, 1], True)
        assert (one["whole"], one["padded"]) == ([[0, 1, 2, 3], [0, 2, 4, 6]], [4])
        assert one["mixed"] == [[0, 1, 2], [0, 0, 1]]
        assert one["loaded"]
    assert first["drawn"][0] != second["drawn"][0]
    assert first["drawn"][1] == second["drawn"][1]
    assert first["weights"] == second["weights"]
    assert_goes_on(tmp_path / "state", first["weights"])


def assert_goes_on(checkpoint, weights):
    """The checkpoint has each tensor once, and one process on the CPU, which would have trained the same, loads it."""
    from safetensors import safe_open

    kept = []
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            kept += opened.keys()
    assert len(kept) == len(set(kept))
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.ones(2, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: value.tolist() for name, value in model.state_dict().items()}
    model = torch.nn.Linear(2, 2)
    loader = DataLoader(torch.arange(10.0), batch_size=2)
    model, *_ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader)
    accelerator.load_state(checkpoint)
    accelerator.end_training()
    for name, value in model.state_dict().items():
        assert value.tolist() == weights[name]
        torch.testing.assert_close(value, torch.tensor(trained[name]), rtol=1e-5, atol=1e-6)


SHARDED = """
import torch
from torch.utils.data import DataLoader
from accel import Accelerator
from accel_backends import XLABackend
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from accel_testing.equivalence.programs import adamw

accelerator = Accelerator()
torch.manual_seed(0)
model = TinyMLP(hidden=64)
model, optimizer, loader = accelerator.prepare(model, adamw(model), DataLoader(SyntheticData(48), batch_size=8))
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
import torch_xla

specs = {torch_xla._XLAC._get_xla_sharding_spec(one) for one in model.parameters()}
assert all("devices=[" in one and "replicated" not in one for one in specs), specs
assert accelerator.distributed_type == "XLA" and accelerator.native(XLABackend).watch.late == 0
accelerator.save_model(model, "trained")
accelerator.end_training()
"""


def test_the_usual_flags_of_fsdp_shard_over_the_devices(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    command = [sys.executable, "-m", "accel", "launch", "--tpu", "--gradient_accumulation_steps", "2"]
    sharded = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "true", "train.py"]
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    run_command([*command, *sharded], env=devices, cwd=tmp_path, timeout=300).check()
    torch.manual_seed(0)
    model = TinyMLP(hidden=64)
    optimizer, data = adamw(model), SyntheticData(48)
    for x, y in zip(data.x.split(16), data.y.split(16), strict=True):
        torch.nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    from safetensors.torch import load_file

    found = load_file(tmp_path / "trained" / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_notebook_on_a_tpu_trains_in_its_own_process(on_devices):
    def body():
        def train(number):
            accelerator = Accelerator()
            found = (
                accelerator.device.type,
                accelerator.native(XLABackend).num_devices,
                accelerator.mixed_precision,
                number,
            )
            accelerator.end_training()
            return found, os.getpid()

        os.environ["TPU_NAME"] = "local"
        ((found, pid),) = notebook_launcher(train, (3,), mixed_precision="bf16")
        with pytest.raises(ConfigError, match="num_processes is 8: on a TPU one process, this one, drives all cores"):
            notebook_launcher(train, (3,), num_processes=8)
        return found, pid == os.getpid()

    assert on_devices(4, body) == (("xla", 4, "bf16", 3), True)


def test_the_page_about_xla_runs_as_shown(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "guides" / "xla.md").read_text(encoding="utf-8")
    script = tmp_path / "xla_train.py"
    script.write_text(re.search(r"```python\n# xla_train.py\n(.*?)```", page, re.DOTALL)[1])
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = run_command([sys.executable, str(script)], env=variables, cwd=tmp_path, timeout=300).check()
    assert "xla 4 0" in done.output.splitlines()


PROGRAM = """
import torch
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from accel_testing.equivalence.program import Program


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
