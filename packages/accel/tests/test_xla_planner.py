"""The planner on XLA devices: what it predicts is what a compiled step holds, and "auto" trains with what it chose."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from benchmarks.planner import differences
from benchmarks.planner_xla import compared

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("strategy", ["xla", "xla:shard"])
def test_what_is_predicted_is_what_a_compiled_step_holds(strategy):
    off = differences(compared("mlp", strategy))
    assert all(abs(off[part]) <= 2 for part in ("parameters", "gradients", "optimizer")), off
    assert -17 <= off["peak"] <= 36, off


@pytest.mark.parametrize(
    ("memory", "shards"), [("4x1MB", False), ("4x60kB", True)], ids=["all that is there", "too little for copies"]
)
def test_auto_chooses_by_the_memory_of_each_device_and_trains(on_devices, memory, shards):
    def body():
        from accel_planner import AutoStrategy

        accelerator = Accelerator(strategy=AutoStrategy(hardware=memory, loss=loss))
        torch.manual_seed(0)
        model = TinyMLP(hidden=200)
        loader = DataLoader(SyntheticData(64), batch_size=16)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        losses = []
        for batch in loader:
            losses.append(loss(model, batch))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        found = accelerator.backend.config.shard_parameters, str(accelerator.choice), [float(one) for one in losses]
        accelerator.end_training()
        return found

    def loss(model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    sharded, choice, losses = on_devices(4, body)
    assert sharded is shards
    assert "strategy 'auto' chose xla" in choice
    assert losses[-1] < losses[0]


def test_auto_describes_the_devices_of_this_machine_itself(on_devices):
    def body():
        from accel_planner import Hardware

        accelerator = Accelerator()
        here, found = Hardware.here(), Hardware.detect(accelerator.session)
        accelerator.end_training()
        return here, found

    here, found = on_devices(4, body)
    assert here == found
    assert (found.kind, found.devices, found.nodes) == ("xla", 4, 1)
