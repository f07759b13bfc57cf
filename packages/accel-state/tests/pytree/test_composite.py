import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from accel_state.pytree.composite import is_composite


def test_only_tensors_of_several_tensors_are_composite() -> None:
    assert is_composite(TwoTensor(torch.ones(2), torch.zeros(2)))
    assert is_composite(torch.nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2))))
    for other in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), TwoTensor, None, [torch.ones(2)]):
        assert not is_composite(other)


@pytest.mark.ranks(2)
def test_a_dtensor_is_not_composite() -> None:
    assert not is_composite(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,))))
