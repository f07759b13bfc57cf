"""The backend that Accelerate's options and variables choose."""

from typing import Any

import pytest

from accel_testing import RankPool

VARIABLES = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}


def opened(*, subclass: bool) -> tuple[str, Any, bool]:
    from accel_compat.facade.accelerator import CompatAccelerator as Accelerator
    from accel_compat.options.handlers import CompatDDPKwargs
    from accel_compat.state.accelerator_state import SharedAcceleratorState

    class Own(CompatDDPKwargs):
        """Options of a script's own class."""

    kind = Own if subclass else CompatDDPKwargs
    try:
        accelerator = Accelerator(kwargs_handlers=[kind(find_unused_parameters=True)])
        backend = accelerator._backend
        return accelerator.distributed_type.value, type(backend).__name__, backend.config.find_unused_parameters
    finally:
        SharedAcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("subclass", [False, True])
def test_on_the_cpu_ddp_trains_with_its_options_where_deepspeed_is_asked_for(
    rank_pool: RankPool, subclass: bool
) -> None:
    found = rank_pool.run(opened, ranks=2, variables=VARIABLES, subclass=subclass)
    assert found == [("MULTI_CPU", "DDPBackend", True)] * 2
