import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from accel_state.pytree.composite import inner_tensors, is_composite


def test_only_tensors_of_several_tensors_are_composite() -> None:
    assert is_composite(TwoTensor(torch.ones(2), torch.zeros(2)))
    assert is_composite(torch.nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2))))
    for other in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), TwoTensor, None, [torch.ones(2)]):
        assert not is_composite(other)


def test_tensors_inside_of_others_are_named_by_their_attributes() -> None:
    nested = TwoTensor(TwoTensor(torch.ones(2), torch.zeros(2)), torch.full((2,), 3.0))
    found = inner_tensors(nested)
    assert {name: one.tolist() for name, one in found.items()} == {"a.a": [1, 1], "a.b": [0, 0], "b": [3, 3]}
    assert inner_tensors(torch.ones(2)) == {}


@pytest.mark.ranks(2)
def test_a_dtensor_is_not_composite() -> None:
    assert not is_composite(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,))))
