import copy

import pytest
import torch
from torch import nn

from accel_backends import Bundle, DDPBackend, DDPConfig, Run, SyncBatchNorm, convert_sync_batch_norm
from accel_precision import PrecisionPolicy
from accel_state import Session


def net(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4)
    ).double()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_equals_batch_norm_on_the_global_batch(rank, world_size, momentum):
    """Bound: 1e-10 of weights and running statistics after 5 steps in fp64."""
    ddp = DDPBackend(Run(Session.open(device="cpu"), PrecisionPolicy()), DDPConfig(sync_batch_norm=True))
    model = net(momentum)
    reference = copy.deepcopy(model)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = ddp.prepare(Bundle([model], [own])).models[0]
    draw = torch.Generator().manual_seed(1)
    for _ in range(5):
        whole = torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=draw) * 3 + 1
        ddp.backward(model(whole[rank * 4 : (rank + 1) * 4]).pow(3).mean())
        reference(whole).pow(3).mean().backward()
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    state = ddp.states.model(model)
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-10, atol=1e-12)
    model.eval()
    reference.eval()
    torch.testing.assert_close(model(whole), reference(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_ranks_may_have_batches_of_different_sizes(rank):
    torch.manual_seed(0)
    whole = torch.randn(7, 3, dtype=torch.float64)
    share = whole[:2] if rank == 0 else whole[2:]
    ordinary = nn.BatchNorm1d(3).double()
    synced = convert_sync_batch_norm(copy.deepcopy(ordinary))
    expected = ordinary(whole)
    torch.testing.assert_close(synced(share), expected[:2] if rank == 0 else expected[2:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(synced.running_var, ordinary.running_var)


def test_parameters_and_buffers_stay_the_same_objects():
    model = net()
    held = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    converted = convert_sync_batch_norm(model)
    assert [id(tensor) for tensor in (*converted.parameters(), *converted.buffers())] == held
    assert isinstance(converted[1], SyncBatchNorm)
    assert converted[1] is convert_sync_batch_norm(converted)[1]


def test_outside_training_it_is_ordinary_and_needs_no_group():
    model = net().eval()
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    expected = model(x)
    assert torch.equal(convert_sync_batch_norm(model)(x), expected)


@pytest.mark.ranks(1)
def test_one_value_has_no_variance():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(nn.BatchNorm1d(3))(torch.ones(1, 3))
