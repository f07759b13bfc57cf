"""Collectives with Accelerate's arguments."""

import torch

from accel_testing.ranks.pool import RankPool


def reduced() -> list[list[float | bool]]:
    from accel_compat import install, uninstall
    from accel_compat.state.accelerator_state import SharedAcceleratorState

    install()
    try:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        given = torch.tensor([1.0, 4.0]) * (accelerator.process_index + 1)
        options = [{}, {"reduction": "mean"}, {"reduction": "max"}, {"reduction": "none"}, {"scale": 0.5}]
        flags = {"any": torch.tensor([accelerator.process_index == 1, False])}
        return [
            *(accelerator.reduce(given, **one).tolist() for one in options),
            accelerator.reduce(flags)["any"].tolist(),
        ]
    finally:
        SharedAcceleratorState._reset_state(reset_partial_state=True)
        uninstall()


def test_reductions_are_those_of_accelerate(rank_pool: RankPool) -> None:
    expected = [[3.0, 12.0], [1.5, 6.0], [2.0, 8.0], [3.0, 12.0], [3.0, 12.0], [True, False]]
    assert rank_pool.run(reduced, ranks=2) == [expected] * 2
