"""A folder of DeepSpeed's engine with the files that Accelerate adds becomes a checkpoint."""

import pytest
import torch

import accel
from accel_compat.checkpoints.files import save_accelerator_state
from accel_compat.checkpoints.importing import import_folder
from accel_compat.state.process_state import SharedPartialState

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("has_schedule", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_and_optimizer_of_the_engine_are_those_of_the_run(tmp_path, has_schedule):
    SharedPartialState(cpu=True)
    torch.manual_seed(0)
    plugin = accel.DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)
    accelerator = accel.Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    accelerator.export_deepspeed(tmp_path / "folder", tag="pytorch_model")
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0), 2)
    save_accelerator_state(tmp_path / "folder", [], [], [schedule] * has_schedule, [], 0, 1)

    report = import_folder(tmp_path / "folder", tmp_path / "out")
    assert report.layout == "deepspeed"
    assert any("inside of DeepSpeed's engine" in note for note in report.notes) is not has_schedule
    other = accel.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = other.prepare(model, optimizer, schedule)
    other.load_state(tmp_path / "out")
    other.end_training()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert all(float(one["step"]) == 1 for one in optimizer.state.values())
    assert len(optimizer.state) == 4
