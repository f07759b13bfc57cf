"""Private names of torch: they do in this torch what they are read for, and without them there is a fallback."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_backends import private
from accel_state.errors import BackendError


def test_all_batch_normalisations_have_the_base():
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert [issubclass(kind, private.BatchNorm) for kind in kinds] == [True] * 4
    assert not issubclass(nn.LayerNorm, private.BatchNorm)
    assert nn.BatchNorm1d.__base__ is private.BatchNorm  # taken without the private name


def test_normalisations_with_running_statistics_have_one_class():
    kinds = (nn.BatchNorm2d, nn.LazyBatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.LazyInstanceNorm3d)
    assert [issubclass(kind, private.RunningNorm) for kind in kinds] == [True] * 5
    assert not issubclass(nn.GroupNorm, private.RunningNorm)
    assert private.BatchNorm.__base__ is private.RunningNorm  # taken without the private name


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_norms_are_the_same_one_by_one(monkeypatch, order, dtype):
    tensors = [torch.arange(6.0).view(2, 3) - 2, torch.tensor([-7.0])]
    together = torch.stack(list(private.norms_of(tensors, order, dtype)))
    monkeypatch.delattr(torch, "_foreach_norm")
    one_by_one = torch.stack(list(private.norms_of(tensors, order, dtype)))
    torch.testing.assert_close(together, one_by_one, rtol=1e-6, atol=0)
    assert together.dtype == (dtype or torch.float32)


def test_hooks_after_accumulation_move_with_their_handles():
    parameter, successor = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    private.move_accumulation_hooks(parameter, successor)
    assert private.accumulation_hooks(successor) == {}

    def triple(one):
        one.grad.mul_(3)

    handle = parameter.register_post_accumulate_grad_hook(triple)
    private.move_accumulation_hooks(parameter, successor)
    successor.sum().backward()
    assert successor.grad.item() == 3.0
    handle.remove()
    assert private.accumulation_hooks(successor) == {}


@pytest.mark.parametrize("multiply", [private.multiply, private._multiply_each])
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_tensors_are_multiplied_in_place(multiply, factor):
    tensors = [torch.tensor([2.0, 4.0]), torch.tensor(6.0)]
    multiply(tensors, factor)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 2.0], 3.0]


@pytest.mark.parametrize("clamp", [private.clamp, private._clamp_each, private._clamp_together])
def test_tensors_are_clamped_in_place(clamp):
    tensors = [torch.tensor([-3.0, 0.5]), torch.tensor(6.0)]
    clamp(tensors, -1.0, 2.0)
    assert [tensor.tolist() for tensor in tensors] == [[-1.0, 0.5], 2.0]


def test_a_plain_tensor_has_no_shard():
    assert private.shard_of(torch.ones(2)) is None


def test_modules_that_load_in_their_own_way_are_told_apart(monkeypatch):
    class Own(nn.Linear):
        def _load_from_state_dict(self, *args, **kwargs):
            pass

    assert private.loads_as_torch_does(nn.Linear)
    assert not private.loads_as_torch_does(Own)
    monkeypatch.delattr(nn.Module, "_load_from_state_dict")
    assert not private.loads_as_torch_does(nn.Linear)


def test_modules_whose_code_sees_values_in_a_state_dict_are_told_apart(monkeypatch):
    class Own(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return super().state_dict(*args, **kwargs)

    class Saving(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    hooked = nn.Linear(1, 1)
    hooked.register_state_dict_post_hook(lambda *_: None)
    assert private.saves_as_torch_does(nn.Linear(1, 1))
    assert not any(map(private.saves_as_torch_does, [Own(1, 1), Saving(1, 1), hooked]))
    monkeypatch.delattr(nn.Module, "_save_to_state_dict")
    assert not private.saves_as_torch_does(nn.Linear(1, 1))


def test_functions_of_fsdp2_are_told_apart():
    from torch.distributed.fsdp import FSDPModule

    assert private.is_of_fsdp2(FSDPModule.unshard)
    assert not private.is_of_fsdp2(nn.Module.forward)
    assert not private.is_of_fsdp2(3)


@pytest.mark.ranks(2)
def test_parameters_of_a_unit_are_found_with_their_collectives():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert list(private.unit_parameters(model)) == []
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    entries = list(private.unit_parameters(model))
    assert [tuple(entry.sharded_param.shape) for entry in entries] == [(4, 4), (4,), (2, 4), (2,)]

    called = []
    made = private.unit_collectives(
        lambda run, *args, **kwargs: called.append("gather") or run(*args, **kwargs),
        lambda run, *args, **kwargs: called.append("reduce") or run(*args, **kwargs),
    )
    assert made is not None
    model.set_custom_all_gather(made[0])
    model.set_custom_reduce_scatter(made[1])
    model(torch.ones(3, 4)).sum().backward()
    assert set(called) == {"gather", "reduce"}
    assert private.full_parameter(entries[0]).shape == (4, 4)
    shard = private.shard_of(next(model.parameters()))
    assert type(shard) is torch.Tensor
    assert shard.shape == (2, 4)


class Unit(nn.Module):
    """A unit with the attributes that a version of torch gives its state."""

    def __init__(self, **state):
        super().__init__()
        self.state = SimpleNamespace(**state)

    def _get_fsdp_state(self):
        return self.state


def test_groups_of_parameters_are_found_in_torch_before_and_since_2_13():
    assert list(private.unit_groups(Unit(_fsdp_param_groups=[1, 2]))) == [1, 2]
    assert list(private.unit_groups(Unit(_fsdp_param_group=1))) == [1]
    assert list(private.unit_groups(Unit(_fsdp_param_group=None))) == []


def test_a_torch_that_keeps_units_elsewhere_is_named():
    with pytest.raises(BackendError, match=r"torch 2\.9 to 2\.15"):
        private.unit_parameters(Unit())


def test_a_torch_without_collectives_of_units_keeps_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_collectives", None)
    assert private.unit_collectives(lambda run: run(), lambda run: run()) is None


def test_a_torch_without_calls_of_units_is_named():
    words = r"has no FSDPState\._lazy_init, as torch 2\.13 has.*dp_replicate_size instead of ep_size and cp_size$"
    with pytest.raises(BackendError, match=words):
        private.joined_units([Unit()], ("ep_size", "cp_size"))
    unit = Unit(_lazy_init=print, _fsdp_param_groups=[SimpleNamespace(post_backward=print)])
    with pytest.raises(BackendError, match=r"has no FSDPParamGroup\.finalize_backward.*instead of dp_shard_size$"):
        private.joined_units([unit], ("dp_shard_size",))


def test_first_messages_of_stages_are_as_long_as_expected_and_for_other_ranks():
    device = torch.device("cpu")
    ops = [SimpleNamespace(group_peer=peer, tensor=torch.tensor(3, device=device)) for peer in (0, 1, 2)]
    stage = SimpleNamespace(group_rank=1, _get_init_p2p_neighbors_ops=lambda: ops)
    private.repair_first_messages(stage)
    found = stage._get_init_p2p_neighbors_ops()
    assert [op.group_peer for op in found] == [0, 2]
    assert all(op.tensor.dtype is torch.float32 and op.tensor.numel() == 1 for op in found)


def test_schedules_without_backwards_keep_their_forwards():
    forward, backward = (SimpleNamespace(computation_type=SimpleNamespace(name=name)) for name in ("FORWARD", "SEND_B"))
    schedule = SimpleNamespace(pipeline_order_with_comms={0: [forward, backward]})
    private.leave_out_backwards(schedule, {"FORWARD"})
    assert schedule.pipeline_order_with_comms[0] == [forward]
    with pytest.raises(BackendError, match=r"keeps the actions of SimpleNamespace elsewhere .*schedule='1f1b'"):
        private.leave_out_backwards(SimpleNamespace(), {"FORWARD"})


def test_ddp_finds_the_parameters_that_it_leaves_out():
    model = nn.Linear(2, 2)
    private.leave_out_of_ddp(model, ["weight"])
    private.leave_out_of_ddp(model, ["bias"])
    assert model._ddp_params_and_buffers_to_ignore == ["weight", "bias"]
