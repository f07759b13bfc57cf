"""Bytes of modules."""

import pytest
import torch

from accel_inference.placement.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    direct_parts,
    get_max_layer_size,
)
from accel_state.enums import CustomDtype


def test_every_level_has_its_sum(three_layers):
    sizes = compute_module_sizes(three_layers())
    assert (sizes[""], sizes["linear1"], sizes["linear1.weight"], sizes["batchnorm"], sizes["linear2"]) == (
        236,
        64,
        48,
        72,
        100,
    )


@pytest.mark.parametrize(
    ("dtype", "total"), [(torch.float16, 122), ("bfloat16", 122), (CustomDtype.INT4, 37), (torch.float64, 236)]
)
def test_a_dtype_shrinks_floating_point_tensors_only(three_layers, dtype, total):
    assert compute_module_sizes(three_layers(), dtype)[""] == total


def test_a_special_dtype_is_of_one_tensor(three_layers):
    sizes = compute_module_sizes(three_layers(), torch.float16, {"linear1.weight": torch.float32})
    assert (sizes["linear1.weight"], sizes["linear1.bias"]) == (48, 8)


def test_buffers_alone(three_layers):
    model = three_layers()
    model.linear1.register_buffer("extra", torch.zeros(10, 10))
    model.linear2.register_buffer("extra", torch.zeros(20, 10))
    assert compute_module_total_buffer_size(model) == 1240
    assert compute_module_total_buffer_size(model.half()) == 624


def test_the_largest_layer_is_named(three_layers):
    model = three_layers()
    assert calculate_maximum_sizes(model) == (236, (100, ["linear2"]))
    parts = direct_parts("", torch.nn.Sequential(model))
    sizes = compute_module_sizes(torch.nn.Sequential(model))
    assert get_max_layer_size(parts, sizes, ["ThreeLayers"]) == (236, ["0"])
