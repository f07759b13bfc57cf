import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_backends import clip_grad_norm, clip_grad_value
from accel_state import BackendError


def with_gradients(seed=0, dtypes=(torch.float32,)):
    draw = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(3, 4, dtype=dtypes[i % len(dtypes)])) for i in range(5)]
    for parameter in parameters[:-1]:
        parameter.grad = (torch.randn(3, 4, generator=draw) * 3).to(parameter.dtype)
    return parameters


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 100.0), st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]))
def test_norm_and_gradients_are_torchs(seed, max_norm, norm_type):
    """The reference is torch.nn.utils.clip_grad_norm_; bit for bit."""
    ours, theirs = with_gradients(seed), with_gradients(seed)
    norm = clip_grad_norm(ours, max_norm, norm_type)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:-1], theirs[:-1], strict=True))


def test_gradients_of_several_dtypes_have_one_norm():
    parameters = with_gradients(dtypes=(torch.float32, torch.float64, torch.bfloat16))
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters[:-1]))
    assert float(clip_grad_norm(parameters, 1.0)) == pytest.approx(expected, rel=1e-2)


def test_inf_only_measures():
    parameters = with_gradients()
    before = [parameter.grad.clone() for parameter in parameters[:-1]]
    norm = clip_grad_norm(iter(parameters), math.inf)
    assert float(norm) == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in before)))
    assert all(torch.equal(a, b.grad) for a, b in zip(before, parameters[:-1], strict=True))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_parameters_without_elements_have_norm_zero(norm_type):
    empty, other = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(1))
    empty.grad, other.grad = torch.zeros(0, 3), torch.full((1,), -4.0)
    assert clip_grad_norm([empty], 1.0, norm_type) == 0
    assert clip_grad_norm([empty, other], 1.0, norm_type) == 4
    assert float(other.grad) == pytest.approx(-1.0)


def test_without_gradients_the_norm_is_zero():
    assert float(clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0)) == 0.0


def test_one_tensor_is_taken_as_one():
    parameter = with_gradients()[0]
    clip_grad_norm(parameter, 1.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_sparse_gradients_are_clipped():
    table = nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1, 1])).sum() * 10).backward()
    assert float(clip_grad_norm(table.parameters(), 1.0)) == pytest.approx(math.sqrt(800))
    assert float(table.weight.grad.to_dense().norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_are_reported_by_name_when_asked(bad):
    parameters = with_gradients()
    parameters[2].grad[1, 1] = bad
    names = {id(parameter): f"layer.{index}" for index, parameter in enumerate(parameters)}
    before = parameters[0].grad.clone()
    with pytest.raises(BackendError, match=r"gradients with nan or inf: layer\.2$"):
        clip_grad_norm(parameters, 1.0, error_if_nonfinite=True, names=lambda: names)
    assert torch.equal(before, parameters[0].grad)
    assert not math.isfinite(float(clip_grad_norm(parameters, 1.0)))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type):
    with pytest.raises(BackendError, match="norm_type is"):
        clip_grad_norm(with_gradients(), 1.0, norm_type)


@pytest.mark.parametrize("limit", [-1.0, math.nan, None, "1"])
def test_a_limit_that_is_no_number_from_zero_on_is_refused(limit):
    with pytest.raises(BackendError, match=f"max_norm is {limit!r}; expected a number >= 0"):
        clip_grad_norm(with_gradients(), limit)
    with pytest.raises(BackendError, match=f"clip_value is {limit!r}; expected a number >= 0"):
        clip_grad_value(with_gradients(), limit)


def test_values_are_limited():
    ours, theirs = with_gradients(), with_gradients()
    clip_grad_value(ours, 0.7)
    nn.utils.clip_grad_value_(theirs, 0.7)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:-1], theirs[:-1], strict=True))


@pytest.mark.ranks(2)
def test_the_norm_of_halves_is_finite_where_its_square_is_not(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.full((4, 4), 100.0, dtype=torch.float16)
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    norm = clip_grad_norm([parameter], 1.0)
    assert (norm.dtype, float(norm)) == (torch.float16, pytest.approx(400.0, rel=1e-3))
    torch.testing.assert_close(parameter.grad.full_tensor(), whole / 400, rtol=1e-3, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("kind", ["shard", "replicate", "partial", "uneven", "mixed"])
@pytest.mark.sampled(5)
def test_the_norm_of_dtensors_is_that_of_full_tensors(rank, world_size, norm_type, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    rows = 1 if kind == "uneven" else 4
    whole = [torch.randn(rows, 3, dtype=torch.float64) for _ in range(3)]
    placement = Replicate() if kind == "replicate" else Shard(0)
    parameters = []
    for index, full in enumerate(whole):
        if kind == "mixed" and index == 0:
            parameter = nn.Parameter(torch.zeros_like(full))
            parameter.grad = full.clone()
        else:
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, [placement]))
            gradient = distribute_tensor(full.clone(), mesh, [placement])
            if kind == "partial":
                parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, [Replicate()]))
                gradient = DTensor.from_local(full / world_size, mesh, [Partial()])
            parameter.grad = gradient
        parameters.append(parameter)
    reference = [nn.Parameter(torch.zeros_like(full)) for full in whole]
    for parameter, full in zip(reference, whole, strict=True):
        parameter.grad = full.clone()
    expected = nn.utils.clip_grad_norm_(reference, 0.5, norm_type)
    norm = clip_grad_norm(parameters, 0.5, norm_type)
    assert type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    if kind == "partial":
        return  # a partial gradient is measured whole, and scaled where it lies
    for own, other in zip(parameters, reference, strict=True):
        gradient = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(gradient, other.grad, rtol=1e-12, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_every_rank_has_the_norm_of_a_gradient_that_is_not_finite_on_one(rank, world_size, norm_type, bad):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    for row in range(world_size):
        full = torch.ones(world_size, 3)
        full[row, 1] = bad
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(full, mesh, [Shard(0)])
        assert repr(float(clip_grad_norm([parameter], 1.0, norm_type))) == repr(bad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_complex_dtensors_is_real(rank, world_size, norm_type):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    for rows in (1, 4):  # with one, a rank has no elements
        whole = torch.complex(torch.arange(3.0 * rows), torch.ones(3 * rows)).view(rows, 3)
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        norm = clip_grad_norm([parameter], 1.0, norm_type)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(whole, norm_type))


@pytest.mark.ranks(4)
def test_the_norm_over_a_two_dimensional_mesh(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = torch.randn(4, 4, dtype=torch.float64)
    placements = ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()])
    parameters = []
    for placement in placements:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placement))
        parameter.grad = distribute_tensor(whole.clone(), mesh, placement)
        parameters.append(parameter)
    expected = math.sqrt(3) * whole.norm()
    torch.testing.assert_close(clip_grad_norm(parameters, math.inf), expected, rtol=1e-12, atol=0)
