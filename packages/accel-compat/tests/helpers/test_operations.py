"""Collectives with Accelerate's arguments."""

import pytest
import torch

from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.state.accelerator_state import SharedAcceleratorState


@pytest.mark.ranks(2)
def test_reductions_are_those_of_accelerate(rank: int) -> None:
    accelerator = CompatAccelerator(cpu=True)
    given = torch.tensor([1.0, 4.0]) * (rank + 1)
    for options, expected in (
        ({}, [3.0, 12.0]),
        ({"reduction": "mean"}, [1.5, 6.0]),
        ({"reduction": "max"}, [2.0, 8.0]),
        ({"reduction": "none"}, [3.0, 12.0]),
        ({"scale": 0.5}, [3.0, 12.0]),
    ):
        assert accelerator.reduce(given, **options).tolist() == expected, options
    flags = accelerator.reduce({"any": torch.tensor([rank == 1, False])})["any"]
    assert (flags.dtype, flags.tolist()) == (torch.bool, [True, False])
    SharedAcceleratorState._reset_state(reset_partial_state=True)
