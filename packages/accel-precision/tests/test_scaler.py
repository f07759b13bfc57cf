import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from accel_precision import GradScalerKwargs, LossScaler, PrecisionError, PrecisionPolicy, make_scaler


def parameter(value=1.0):
    return nn.Parameter(torch.tensor([value]))


def one_step(scaler, optimizer, weight, gradient):
    optimizer.zero_grad()
    scaler.scale((weight * gradient).sum()).backward()
    return scaler.step(optimizer)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_scale_and_steps_are_those_of_torchs_scaler(overflows, interval):
    """The reference is torch.amp.GradScaler on the same gradients."""
    ours, theirs = LossScaler(GradScalerKwargs(growth_interval=interval)), GradScaler("cpu", growth_interval=interval)
    a, b = parameter(), parameter()
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    for overflow in overflows:
        gradient = math.inf if overflow else 0.5
        stepped = one_step(ours, first, a, gradient)
        ours.update()
        second.zero_grad()
        theirs.scale((b * gradient).sum()).backward()
        theirs.step(second)
        theirs.update()
        assert stepped is not overflow
        assert ours.step_was_skipped is overflow
        assert ours.current == theirs.get_scale()
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_of_any_kind_skips_and_halves_once(bad):
    scaler, weight = LossScaler(), parameter()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([bad])
    assert scaler.step(optimizer) is False
    assert weight.item() == 1.0
    scaler.update()
    scaler.update()
    assert scaler.current == 32768.0
    assert scaler.step_was_skipped


@pytest.mark.parametrize("overflows", [False, True])
def test_an_optimizer_without_parameters_on_this_rank_steps_as_the_others_do(overflows):
    optimizer = torch.optim.AdamW([parameter()], lr=1.0)
    optimizer.param_groups[0]["params"].clear()  # those of other stages of a pipeline
    scaler = LossScaler(reduce=lambda found: found.add_(float(overflows)))
    assert scaler.step(optimizer) is not overflows
    scaler.update()
    assert scaler.step_was_skipped is overflows


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from a device, each of which waits for it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("reduce", [None, lambda found: found])
def test_the_host_reads_one_value_for_each_step_of_an_optimizer(reduce, overflow):
    """As many as torch's own scaler: without a fused optimizer somebody has to know whether the step is taken."""
    scaler = LossScaler(GradScalerKwargs(growth_interval=1), reduce=reduce)
    optimizers = [torch.optim.SGD([parameter(), parameter()], lr=0.1, momentum=0.9) for _ in range(2)]
    for count in range(3):
        with Reads() as reads:
            for optimizer in optimizers:
                for weight in optimizer.param_groups[0]["params"]:
                    weight.grad = torch.full_like(weight, math.inf if overflow and count == 1 else 0.5)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            assert scaler.current > 0
        assert reads.count == len(optimizers)


def test_one_update_for_several_optimizers():
    scaler = LossScaler(GradScalerKwargs(growth_interval=1))
    weights = [parameter(), parameter()]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for weight, bad in zip(weights, (math.inf, 1.0), strict=True):
        weight.grad = torch.tensor([bad]) * scaler.current
    assert [scaler.step(optimizer) for optimizer in optimizers] == [False, True]
    scaler.update()
    assert scaler.current == 32768.0
    assert [weight.item() for weight in weights] == [1.0, 0.0]


@pytest.mark.parametrize(("overflows", "scale"), [((True, False, False), 32768.0), ((False, False, False), 131072.0)])
def test_a_held_scale_changes_at_the_first_update_that_lets_it(overflows, scale):
    """An overflow while it is held is not forgotten; steps while it is held do not count towards growth."""
    scaler, weight = LossScaler(GradScalerKwargs(growth_interval=1)), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for number, overflow in enumerate(overflows):
        assert one_step(scaler, optimizer, weight, math.inf if overflow else 0.5) is not overflow
        assert scaler.current == 65536.0
        scaler.update(hold=number < len(overflows) - 1)
        assert scaler.step_was_skipped is overflow
    assert scaler.current == scale


def test_unscaling_twice_divides_once():
    scaler, weight = LossScaler(), parameter()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([65536.0])
    scaler.unscale(optimizer)
    scaler.unscale(optimizer)
    assert float(weight.grad) == 1.0
    scaler.step(optimizer)
    assert weight.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_several_dtypes_are_unscaled(dtype):
    scaler = LossScaler()
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)), parameter()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for weight in weights:
        weight.grad = torch.full_like(weight, 65536.0)
    scaler.unscale(optimizer)
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in weights)


@pytest.mark.parametrize("conjugated", [False, True])
@pytest.mark.parametrize("bad", [1.0, math.nan])
def test_complex_gradients_are_unscaled(conjugated, bad):
    weight, factor = nn.Parameter(torch.tensor([1 + 2j])), torch.tensor([bad + 3j])
    scaler, optimizer = LossScaler(GradScalerKwargs(init_scale=8.0)), torch.optim.SGD([weight], lr=0.1)
    scaler.scale(((weight.conj() if conjugated else weight) * factor).real.sum()).backward()
    scaler.unscale(optimizer)
    if bad == 1.0:
        assert torch.equal(weight.grad, factor if conjugated else factor.conj())
    assert scaler.step(optimizer) is (bad == 1.0)


def test_sparse_gradients_are_unscaled_once_for_each_index():
    scaler, table = LossScaler(GradScalerKwargs(init_scale=4.0)), nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale(optimizer)
    assert torch.equal(table.weight.grad.to_dense()[:, 0], torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]))


def test_gradients_in_half_precision_are_refused():
    scaler, weight = LossScaler(), nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(PrecisionError, match=r"shape \(2,\) is torch.float16.*'fp16' instead of 'fp16-true'"):
        scaler.unscale(torch.optim.SGD([weight], lr=1.0))


def test_another_ranks_overflow_skips_here():
    calls = []

    def reduce(found):
        calls.append(found.shape)
        found += 1.0

    scaler, weight = LossScaler(reduce=reduce), parameter()
    weight.grad = torch.tensor([1.0])
    assert scaler.step(torch.optim.SGD([weight], lr=1.0)) is False
    assert calls == [(1,)]


def test_a_rank_without_gradients_still_takes_part():
    calls = []
    scaler = LossScaler(reduce=calls.append)
    assert scaler.step(torch.optim.SGD([parameter()], lr=1.0)) is True
    assert len(calls) == 1


def test_a_half_precision_loss_is_widened_before_it_is_scaled():
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert float(LossScaler().scale(loss)) == 3.0 * 65536.0


def test_a_static_scale_never_moves():
    policy = PrecisionPolicy.parse("fp16,scaling=static")
    scaler, weight = make_scaler(policy, GradScalerKwargs(init_scale=128.0, growth_interval=1)), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in (1.0, math.inf, 1.0):
        one_step(scaler, optimizer, weight, gradient)
        scaler.update()
        assert scaler.current == 128.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overflow_on", [None, 0, 1])
def test_shards_are_unscaled_where_they_lie_and_ranks_agree(rank, overflow_on):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    full = torch.full((4,), 65536.0)
    if overflow_on is not None:
        full[2 * overflow_on] = math.inf
    weight.grad = distribute_tensor(full, mesh, [Shard(0)])
    scaler = LossScaler(reduce=dist.all_reduce)
    assert scaler.step(torch.optim.SGD([weight], lr=1.0)) is (overflow_on is None)
    expected = 0.0 if overflow_on is not None else -1.0
    assert weight.to_local().detach().tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("policy", "options"), [("bf16", None), ("no", None), ("fp16", GradScalerKwargs(enabled=False))]
)
def test_where_nothing_is_scaled_there_is_no_scaler(policy, options):
    assert make_scaler(PrecisionPolicy.parse(policy), options) is None


def test_a_closure_runs_once_before_gradients_are_looked_at():
    scaler, weight, calls = LossScaler(), parameter(), []
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()

    with torch.no_grad():
        assert scaler.step(optimizer, closure)
    assert calls == [True]
    assert weight.item() == 0.0


def test_an_optimizer_that_repeats_its_closure_is_refused():
    with pytest.raises(PrecisionError, match=r"LBFGS evaluates a closure several times.*'bf16'"):
        LossScaler().step(torch.optim.LBFGS([parameter()]))


def test_stepping_twice_without_update_is_refused():
    scaler, optimizer = LossScaler(), torch.optim.SGD([parameter()], lr=1.0)
    scaler.step(optimizer)
    with pytest.raises(PrecisionError, match="SGD was stepped twice"):
        scaler.step(optimizer)


def test_state_is_json_and_continues_exactly():
    options = GradScalerKwargs(growth_interval=3)
    scaler, weight = LossScaler(options), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for gradient in (math.inf, 1.0, 1.0):
        one_step(scaler, optimizer, weight, gradient)
        scaler.update()
    again = LossScaler(options)
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    one_step(again, optimizer, weight, 1.0)
    again.update()
    assert again.current == 65536.0


@pytest.mark.parametrize(
    "state", [{}, {"scale": 1.0}, {"scale": 0.0, "growth_tracker": 0}, {"scale": math.nan, "growth_tracker": 0}]
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(PrecisionError, match="state of the loss scale"):
        LossScaler().load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(PrecisionError, match=next(iter(options))):
        GradScalerKwargs(**options)


def test_a_model_that_only_gives_nan_is_told_apart_from_overflow():
    scaler, weight = LossScaler(), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def endless():
        for _ in range(100):
            weight.grad = torch.tensor([math.nan])
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(PrecisionError, match=r"overflowed in every step.*error_if_nonfinite"):
        endless()


def test_the_scale_does_not_grow_beyond_fp32():
    scaler, weight = LossScaler(GradScalerKwargs(init_scale=2.0**119, growth_interval=1)), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(3):
        weight.grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.current == 2.0**120


def test_handlers_tell_what_differs_from_the_defaults():
    assert GradScalerKwargs(growth_factor=4.0).to_kwargs() == {"growth_factor": 4.0}
    assert GradScalerKwargs().to_dict()["init_scale"] == 65536.0
