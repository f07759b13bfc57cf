"""XLA devices through an Accelerator: the weights of one process on the CPU, states that go anywhere, few compilations.

They run in an environment with torch_xla (``hatch run xla:test``), on its CPU devices, of which a process can have
several. Each test has processes of its own: what torch_xla decides, it decides once in a process's life.
"""

import logging
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel_testing import RankPool
from accel_testing.equivalence import assert_equivalent
from accel_testing.launching import run_command
from accel_testing.programs import adamw, adamw_program, sgd_program

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("program", "layouts"),
    [
        (sgd_program, "xla/fp32,xla:4/fp32,xla:4/fp32/acc=3,xla:4/fp32/acc=3/short,xla:4/fp32/acc=3/weighted"),
        (adamw_program, "xla:4/fp32/acc=3,xla:4/bf16"),
    ],
)
def test_training_equals_one_process_on_the_cpu(layouts, program):
    """The devices share a process, in which all layouts with as many of them are trained."""
    assert_equivalent(program, layouts)


def on_devices(count, fn, *args, **kwargs):
    """What ``fn`` returns in a process with ``count`` XLA devices."""
    before = dict(os.environ)
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}
    try:
        with RankPool(1, timeout=300) as pool:
            return pool.run(fn, *args, group=None, **kwargs)[0]
    finally:
        os.environ.clear()
        os.environ.update(before)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def samples(count):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(1))


def trained(strategy, *, count=91, epochs=2, even=True):
    """Losses, rows gathered for metrics and the Accelerator, after epochs whose last batch is short."""
    from accel_data import LoaderOptions

    accelerator = Accelerator(strategy=strategy, dataloader_config=LoaderOptions(even_batches=even))
    model = network()
    loader = DataLoader(TensorDataset(samples(count)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    losses, rows = [], []
    for _ in range(epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            rows.append(accelerator.gather_for_metrics(x.cpu()))
    return [float(one) for one in losses], torch.cat(rows).cpu(), accelerator, model, optimizer


def sharded():
    from accel_backends.xla import XLAConfig

    return XLAConfig(shard_parameters=True)


def plain(count=91, epochs=2):
    model = network()
    optimizer = adamw(model)
    losses = []
    for _ in range(epochs):
        for x in samples(count).split(8):
            loss = model(x[torch.arange(8) % len(x)]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("shard", [False, True])
def test_an_epoch_that_ends_short_compiles_nothing_anew(shard):
    def body():
        losses, rows, accelerator, model, _ = trained(sharded() if shard else None)
        return losses, rows, accelerator.backend.watch.late, accelerator.get_state_dict(model)

    losses, rows, late, state = on_devices(4, body)
    expected, model = plain()
    assert late == 0
    assert torch.equal(rows, samples(91).repeat(2, 1))
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_late_compilation_is_reported_with_its_step():
    def body():
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("accel_backends.xla_compilations").addHandler(handler)
        _, _, accelerator, _, _ = trained(None, epochs=1, even=False)
        return accelerator.backend.watch.late, said

    late, said = on_devices(1, body)
    assert late >= 1
    assert "in optimizer step 12" in said[0]
    assert "even_batches=True" in said[0]


def test_parameters_and_optimizer_states_are_spread_over_the_devices():
    def body():
        import torch_xla

        spec = torch_xla._XLAC._get_xla_sharding_spec
        _, _, accelerator, model, optimizer = trained(sharded(), epochs=1)
        moments = [optimizer.optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        return accelerator.backend.num_devices, [spec(one) for one in [*model.parameters(), *moments]]

    count, specs = on_devices(4, body)
    assert count == 4
    assert all(one.startswith("{devices=[") and "replicated" not in one for one in specs)


def one_epoch(first: Path | None, last: Path, *, shard=False, cpu=False):
    """Goes on from a checkpoint for one epoch and leaves another."""
    accelerator = Accelerator(strategy=sharded() if shard else None, cpu=cpu)
    model = network()
    loader = DataLoader(TensorDataset(samples(88)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    if first is not None:
        accelerator.load_state(first)
    losses = []
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.save_state(last)
    return [float(one) for one in losses], accelerator.get_state_dict(model)


@pytest.mark.parametrize("shard", [False, True])
def test_checkpoints_go_to_the_cpu_and_back(shard, tmp_path):
    path = tmp_path / "state"
    on_devices(4, one_epoch, None, path / "1", shard=shard)
    on_devices(1, one_epoch, path / "1", path / "2", cpu=True)
    losses, state = on_devices(4, one_epoch, path / "2", path / "3", shard=shard)
    expected, model = plain(count=88, epochs=3)
    assert losses == pytest.approx(expected[-11:], rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_random_numbers_go_on_after_a_resume(tmp_path):
    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Dropout(0.5))
        accelerator.save_state(tmp_path / "state")
        x = torch.ones(4, 64, device=accelerator.device)
        first = model(x).cpu()
        accelerator.load_state(tmp_path / "state")
        return first, model(x).cpu()

    first, second = on_devices(1, body)
    assert torch.equal(first, second)


def test_the_page_about_xla_runs_as_shown(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "xla.md").read_text(encoding="utf-8")
    script = tmp_path / "xla_train.py"
    script.write_text(re.search(r"```python\n# xla_train.py\n(.*?)```", page, re.DOTALL)[1])
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = run_command([sys.executable, str(script)], env=variables, cwd=tmp_path, timeout=300).check()
    assert "xla 4 0" in done.output.splitlines()


def test_several_processes_are_refused():
    from accel_backends.xla import XLABackend

    assert "runs on 1 process(es)" in XLABackend.capabilities.refusal("xla", policy(), "xla", 2)


def test_half_precision_is_refused_with_the_nearest():
    def body():
        with pytest.raises(Exception, match="fp16"):
            Accelerator(mixed_precision="fp16")

    on_devices(1, body)


def policy():
    from accel_precision import PrecisionPolicy

    return PrecisionPolicy.parse("no", device_type="cpu")
