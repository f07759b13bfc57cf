"""States of runs on XLA devices: they go to other backends and come back, and what was random goes on."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from accel_testing.equivalence.programs import adamw, train_part

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]


def one_epoch(first, last, *, shard=False, cpu=False):
    """Goes on from a checkpoint for one epoch and leaves another."""
    from accel_backends.xla.backend import XLAConfig

    accelerator = Accelerator(cpu=cpu, strategy=None if cpu else XLAConfig(shard_parameters=shard))
    torch.manual_seed(0)
    model = TinyMLP()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), DataLoader(SyntheticData(88), batch_size=8))
    if first is not None:
        accelerator.load_state(first)
    losses = []
    for x, y in loader:
        loss = mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.save_state(last)
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return [float(one) for one in losses], state


@pytest.mark.parametrize("shard", [False, True])
def test_checkpoints_go_to_the_cpu_and_back(on_devices, shard, tmp_path):
    on_devices(4, one_epoch, None, tmp_path / "1", shard=shard)
    one_epoch(tmp_path / "1", tmp_path / "2", cpu=True)
    losses, state = on_devices(4, one_epoch, tmp_path / "2", tmp_path / "3", shard=not shard)
    before = None
    for number in range(3):
        expected, expected_state = one_epoch(before, tmp_path / f"cpu{number}", cpu=True)
        before = tmp_path / f"cpu{number}"
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close_state(state, expected_state)


CHAIN = ["ds3:2", "fsdp:2", "single:1", "ds2:2", "xla:1"]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_run_goes_through_deepspeed_fsdp_one_process_and_xla(rank_pool, device_pool, tmp_path):
    """Each goes on from the checkpoint of the one before; together they are the run of one process."""
    load, losses = "", []
    for number, layout in enumerate(CHAIN):
        save = str(tmp_path / str(number))
        pool = device_pool(1) if layout == "xla:1" else rank_pool
        state = train_part(pool, f"{layout}/acc=2", 6 * number, 6 * number + 6, load, save)
        losses.append(state.losses)
        load = save
    expected = train_part(rank_pool, "single/acc=2", 0, 6 * len(CHAIN))
    assert_close_state(state, expected)
    torch.testing.assert_close(torch.cat(losses), expected.losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [("xla", "single"), ("single", "xla")])
def test_an_open_window_goes_on_in_another_backend(rank_pool, device_pool, tmp_path, first, second):
    """A step and a half before saving, the other half after loading."""
    pools = {"xla": device_pool(1), "single": rank_pool}
    folder = str(tmp_path / "half")
    train_part(pools[first], f"{first}/acc=2", 0, 3, save=folder)
    state = train_part(pools[second], f"{second}/acc=2", 3, 4, folder)
    assert_close_state(state, train_part(rank_pool, "single/acc=2", 0, 4))


def test_saving_computes_what_is_recorded_once(on_devices, tmp_path):
    """A copy of each tensor alone would be as many programs, each with a part of the step in it."""

    def body():
        from accel_backends.xla.compilations import compilations

        accelerator = Accelerator()
        torch.manual_seed(0)
        model = TinyMLP(hidden=52)
        model, _ = accelerator.prepare(model, adamw(model))
        with torch.no_grad():  # recorded, and not computed yet
            for parameter in model.parameters():
                parameter.mul_(2).add_(1)
        before = compilations()
        accelerator.save_state(tmp_path / "state")
        accelerator.end_training()
        return compilations() - before

    assert on_devices(1, body) == 1


def test_random_numbers_go_on_after_a_resume(on_devices, tmp_path):
    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Dropout(0.5))
        x = torch.ones(4, 64, device=accelerator.device)
        model(x).cpu()
        accelerator.save_state(tmp_path / "state")
        first, second = model(x).cpu(), model(x).cpu()
        accelerator.load_state(tmp_path / "state")
        again = model(x).cpu(), model(x).cpu()
        accelerator.end_training()
        return (first, second), again

    (first, second), again = on_devices(1, body)
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


def test_a_seed_makes_the_same_numbers_again(on_devices):
    def body():
        from accel_state.rng import set_seed

        accelerator = Accelerator()
        drawn = []
        for seed in (1, 2, 1):
            set_seed(seed)
            drawn.append(torch.rand(8, device=accelerator.device).cpu())
        accelerator.end_training()
        return drawn

    first, other, again = on_devices(1, body)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
