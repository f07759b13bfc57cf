"""Models without memory."""

import torch
from torch import nn

from accel_backends.ops.meta_init import make_empty


class Own(torch.Tensor):
    """A class of tensors without ``new_empty``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.new_empty:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_of_any_class_is_emptied():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64).as_subclass(Own))
    held = parameter
    make_empty(parameter)
    assert (held.numel(), held.dtype, held.requires_grad) == (0, torch.float64, True)
