"""XLA devices through an Accelerator: the weights of one process on the CPU, few compilations, steps that end in time.

They run in an environment with torch_xla (``hatch run xla:test``), on its CPU devices, of which a process can have
several.
"""

import logging
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_backends import XLABackend
from accel_state import Topology
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.models import SyntheticData, TinyMLP
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.equivalence.programs import adamw, adamw_program

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla, which the environment 'xla' has"),
    pytest.mark.timeout(600),
]


def regression_loss(model, batch):
    x, y = batch
    return mse_loss(model(x), y)


def regression_program(optimizer=momentum_sgd):
    """Twenty clipped steps of a small network, which compile faster than those of a transformer."""
    data = SyntheticData(20 * 24)
    batches = list(zip(data.x.split(24), data.y.split(24), strict=True))
    torch.manual_seed(0)
    return Program(TinyMLP(), regression_loss, batches, optimizer, clip=0.05)


@pytest.mark.parametrize(
    ("program", "layouts"),
    [
        (
            regression_program,
            "xla/fp32,xla:4/fp32,xla:4/fp32/acc=3,xla:4/fp32/acc=3/short,xla:4/fp32/acc=3/weighted",
        ),
        (
            partial(regression_program, adamw),
            "xla/fp32/acc=3,xla:4/fp32/acc=3/shard_parameters=true,xla:4/fp32/shard_parameters=true/min_shard_size=100",
        ),
        (adamw_program, "xla:4/fp32/acc=3,xla:4/bf16"),
    ],
    ids=["sgd", "adamw", "transformer"],
)
def test_training_equals_one_process_on_the_cpu(layouts, program):
    """The devices share a process, in which all layouts with as many of them are trained."""
    assert_equivalent(program, layouts)


# -------------------------------------------------------------------------------------------------------- one run


def trained(hidden, *, shard=False, count=91, epochs=2, even=True, precision="no", watch=None):
    """Losses, outputs gathered for metrics and the parts, after epochs whose last batch is short."""
    from accel_backends.xla.config import XLAConfig
    from accel_data import LoaderOptions

    accelerator = Accelerator(
        strategy=XLAConfig(shard_parameters=shard),
        dataloader_config=LoaderOptions(even_batches=even),
        mixed_precision=precision,
    )
    torch.manual_seed(0)
    model = TinyMLP(hidden=hidden)
    loader = DataLoader(SyntheticData(count), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    losses, rows = [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x).float(), y.float())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            rows.append(accelerator.gather_for_metrics(x))
            if watch is not None:
                watch(accelerator, model, (x, y))
    accelerator.end_training()
    found = [float(one) for one in losses], torch.cat([row.cpu() for row in rows])
    return *found, accelerator, model, optimizer


def plain(hidden, count=91, epochs=2):
    torch.manual_seed(0)
    model = TinyMLP(hidden=hidden)
    optimizer = adamw(model)
    data = SyntheticData(count)
    losses = []
    for _ in range(epochs):
        for x, y in zip(data.x.split(8), data.y.split(8), strict=True):
            filled = torch.arange(8) % len(x)
            loss = mse_loss(model(x[filled]), y[filled])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


def records(name):
    """The messages of a logger, from now on."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return said


@pytest.mark.parametrize(("shard", "hidden"), [(False, 20), (True, 24)])
def test_an_epoch_that_ends_short_compiles_nothing_anew(on_devices, shard, hidden):
    def body():
        said = records("accel_backends.xla.compilations")
        losses, rows, accelerator, model, _ = trained(hidden, shard=shard)
        return losses, rows, accelerator.native(XLABackend).watch, said, accelerator.get_state_dict(model)

    losses, rows, watch, said, state = on_devices(4, body)
    expected, model = plain(hidden)
    assert (watch.steps, watch.late, said) == (24, 0, [])
    assert torch.equal(rows, SyntheticData(91).x.repeat(2, 1))
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_late_compilation_is_reported_with_its_step(on_devices):
    def body():
        said = records("accel_backends.xla.compilations")
        _, _, accelerator, _, _ = trained(28, epochs=1, even=False)
        return accelerator.native(XLABackend).watch.late, said

    late, said = on_devices(1, body)
    assert late >= 1
    assert len(said) == 1
    assert "in optimizer step 12" in said[0]
    assert "even_batches=True" in said[0]


def test_a_late_compilation_in_a_micro_batch_is_reported_too(on_devices):
    def body():
        said = records("accel_backends.xla.compilations")
        accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = TinyMLP(hidden=60)
        optimizer = adamw(model)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        loader = DataLoader(SyntheticData(96), batch_size=8)
        model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
        for number, (x, y) in enumerate(loader):
            some = slice(None) if number != 8 else slice(4)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x[some]), y[some]))
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        accelerator.end_training()
        watch = accelerator.native(XLABackend).watch
        return watch.steps, watch.late, said

    steps, late, said = on_devices(1, body)
    assert (steps, late) == (6, 1)
    assert ["in a micro-batch of optimizer step 5" in one for one in said] == [True]


def test_parameters_states_and_rows_of_batches_are_spread_over_the_devices(on_devices):
    def body():
        import torch_xla

        spec = torch_xla._XLAC._get_xla_sharding_spec
        batches = []
        _, _, accelerator, model, optimizer = trained(
            32, shard=True, epochs=1, watch=lambda accelerator, model, batch: batches.extend(map(spec, batch))
        )
        moments = [optimizer.optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        return (
            accelerator.native(XLABackend).num_devices,
            [spec(one) for one in [*model.parameters(), *moments]],
            batches,
        )

    count, specs, batches = on_devices(4, body)
    assert count == 4
    assert all(one.startswith("{devices=[") and "replicated" not in one for one in specs)
    assert len(batches) == 24
    assert all(one.startswith("{devices=[4,1]") for one in batches)


def test_a_step_has_run_where_it_ends_and_a_micro_batch_at_the_end_of_its_block(on_devices):
    """Nothing is left recorded then, or steps would grow together; and each micro-batch is one computation."""

    def body():
        import torch_xla
        import torch_xla.debug.metrics as metrics

        def runs():
            return sum(metrics.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))

        def recorded(tensors):
            text = torch_xla._XLAC._get_xla_tensors_text([tensor for tensor in tensors if tensor is not None])
            lines = [line for line in text.splitlines() if "=" in line and "ROOT" not in line and "IR {" not in line]
            return sum("xla::device_data" not in line for line in lines)

        accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = TinyMLP(hidden=36)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), DataLoader(SyntheticData(32), batch_size=8))
        parameters = list(model.parameters())
        ended, before, after, counts = [], [], [], []
        for x, y in loader:
            counts.append(runs())
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                before.append(recorded([parameter.grad for parameter in parameters]))
                optimizer.step()
                after.append(recorded(parameters))
                optimizer.zero_grad()
            ended.append(recorded([parameter.grad for parameter in parameters]))
        accelerator.end_training()
        return ended, before, after, [after - before for before, after in pairwise(counts)]

    ended, before, after, computations = on_devices(4, body)
    assert all(before)
    assert computations == [1, 1, 1]
    assert ended == [0, 0, 0, 0]
    assert after == [0, 0, 0, 0]


def test_bf16_computes_in_bf16_with_parameters_and_outputs_as_they_were(on_devices):
    def body():
        accelerator = Accelerator(mixed_precision="bf16")
        torch.manual_seed(0)
        model = TinyMLP(hidden=56)
        computed = []
        layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        layer.register_forward_hook(lambda module, args, output: computed.append(output.dtype))
        loader = DataLoader(SyntheticData(43), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
        for x, y in loader:
            output = model(x)
            accelerator.backward(mse_loss(output, y))
            optimizer.step()
            optimizer.zero_grad()
        kept = {output.dtype} | {parameter.dtype for parameter in model.parameters()}
        accelerator.end_training()
        return set(computed), kept, accelerator.native(XLABackend).watch.late

    assert on_devices(4, body) == ({torch.bfloat16}, {torch.float32}, 0)


@pytest.mark.parametrize("shard", [False, True])
def test_parameters_can_be_bf16_themselves(on_devices, shard):
    def body():
        losses, _, accelerator, model, optimizer = trained(44, shard=shard, precision="bf16-true")
        states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        dtypes = {one.dtype for one in [*model.parameters(), *(value for value in states if value.dim())]}
        return losses, dtypes, accelerator.native(XLABackend).watch.late, accelerator.get_state_dict(model)

    losses, dtypes, late, state = on_devices(4, body)
    expected, model = plain(44)
    assert dtypes == {torch.bfloat16}
    assert late == 0
    assert losses == pytest.approx(expected, rel=5e-2)
    assert losses != pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        assert state[name].dtype == torch.bfloat16
        torch.testing.assert_close(state[name].float(), value, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("shard", [False, True])
def test_gradients_are_clipped_as_on_the_cpu(on_devices, shard):
    def clipped(cpu):
        from accel_backends.xla.config import XLAConfig

        accelerator = Accelerator(cpu=cpu, strategy=None if cpu else XLAConfig(shard_parameters=shard))
        torch.manual_seed(0)
        model = TinyMLP(hidden=48)
        model, optimizer = accelerator.prepare(model, momentum_sgd(model))
        x = torch.linspace(-1, 1, 64).view(8, 8).to(accelerator.device)
        norms, gradients = [], []
        for limit in (0.1, 1e3):
            accelerator.backward(model(x).square().sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), limit)))
            gradients += [parameter.grad.cpu().clone() for parameter in model.parameters()]
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            gradients += [parameter.grad.cpu().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
        accelerator.end_training()
        return norms, gradients

    norms, gradients = on_devices(4, clipped, False)
    expected_norms, expected = clipped(True)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.1
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gathering_gives_what_there_is_once(on_devices):
    """One process has the global batch, so every device's rows are in it already."""

    def body():
        accelerator = Accelerator()
        x = torch.arange(8.0, device=accelerator.device)
        tree = {"x": x, "one": x.sum()}
        gathered = accelerator.gather(tree)
        reduced = accelerator.reduce(x, "mean"), accelerator.pad_across_processes(x)
        objects = accelerator.gather_for_metrics(["text"], use_gather_object=True)
        place = accelerator.num_processes, accelerator.process_index, accelerator.device.type
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return place, {name: value.cpu() for name, value in gathered.items()}, [one.cpu() for one in reduced], objects

    place, gathered, reduced, objects = on_devices(4, body)
    assert place == (1, 0, "xla")
    assert torch.equal(gathered["x"], torch.arange(8.0))
    assert gathered["one"].item() == 28
    assert all(torch.equal(one, torch.arange(8.0)) for one in reduced)
    assert objects == ["text"]


# -------------------------------------------------------------------------------------------------- what cannot be


def test_gradients_computed_before_torch_knew_the_devices_are_refused():
    from accel_state import BackendError
    from accel_testing import RankPool
    from accel_testing.equivalence.layouts import Layout

    def body():
        torch.ones(2, requires_grad=True).sum().backward()
        with pytest.raises(BackendError, match="make the Accelerator, or import torch_xla, before that"):
            Accelerator()

    with RankPool(1, timeout=300) as fresh:
        fresh.run(body, group=None, variables=Layout("xla").variables)


@pytest.mark.parametrize(
    ("hosts", "topology", "words"),
    [
        (4, Topology(), "one of 4 machines of a pod, and was started alone"),
        (1, Topology.on_one_node(0, 2), r"2 processes were started on 1 machine\(s\), and XLA's runtime connects 1"),
        (2, Topology(0, 4, 0, 2, 0, 2), r"4 processes were started on 2 machine\(s\), and XLA's runtime connects 2"),
        (2, Topology(0, 4, num_nodes=4), "4 processes were started on 4 .* connects 2"),
    ],
)
def test_other_processes_than_one_on_each_machine_are_refused(hosts, topology, words):
    from accel_backends.xla.backend import check_hosts
    from accel_state import BackendError

    check_hosts(1, Topology())
    check_hosts(2, Topology(1, 2, node_rank=1, num_nodes=2))
    with pytest.raises(BackendError, match=words):
        check_hosts(hosts, topology)


def test_devices_stand_in_the_order_of_the_processes_that_have_them():
    """The runtime may count machines in another order than ranks do, and rows of batches are those of ranks."""
    from accel_backends.xla.mesh import in_rows
    from accel_state import BackendError

    assert in_rows([[2, 3], [0, 1]], 4) == [2, 3, 0, 1]
    for wrong in ([[0, 1], [0, 1]], [[0, 1, 2], [3]], [[0, 1], [2, 3]][:1]):
        with pytest.raises(BackendError, match="expected 4 in all, 0 to 3, equally many on each"):
            in_rows(wrong, 4)


@pytest.mark.parametrize("precision", ["fp16", "fp16-true", "fp8"])
def test_precisions_that_do_not_work_are_refused_by_name(on_devices, precision):
    def body():
        from accel_precision import PrecisionError
        from accel_state import AccelError

        with pytest.raises((AccelError, PrecisionError), match=precision.partition("-")[0]):
            Accelerator(mixed_precision=precision)

    on_devices(1, body)


def test_the_backend_says_how_to_get_devices_where_there_are_none(on_devices):
    def body():
        from accel_state import BackendError

        with pytest.raises(BackendError, match="needs XLA devices, and this is cpu: set PJRT_DEVICE to TPU"):
            Accelerator(cpu=True, strategy="xla")

    on_devices(1, body)


def test_strategies_of_other_devices_are_refused_or_meant_as_sharding(on_devices):
    def body():
        from accel import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
        from accel_state import AccelError

        found = []
        for options in (
            {"fsdp_plugin": FullyShardedDataParallelPlugin()},
            {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")},
            {"strategy": "fsdp"},
            {"kwargs_handlers": [DistributedDataParallelKwargs()]},
        ):
            accelerator = Accelerator(**options)
            found.append((accelerator.backend.name, accelerator.backend.config.shard_parameters))
            accelerator.end_training()
        for options in (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)},
            {"strategy": "ddp"},
            {"strategy": "single"},
        ):
            with pytest.raises(AccelError, match=r"xla|XLA"):
                Accelerator(**options)
        return found

    assert on_devices(1, body) == [("xla", True), ("xla", False), ("xla", True), ("xla", False)]
