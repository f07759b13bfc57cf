"""Floating-point operations of a model."""

import torch
from torch import nn

from accel_observe.meters import count_flops


def test_operations_are_counted_as_the_matrices_say() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    assert count_flops(lambda: model(x).sum(), backward=False) == 2 * 5 * (8 * 16 + 16 * 4)
    # Backward: both weights' gradients, and that of the layer between.
    assert count_flops(lambda: model(x).sum()) == 2 * 5 * (2 * 8 * 16 + 3 * 16 * 4)
