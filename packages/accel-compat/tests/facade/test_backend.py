"""The backend that Accelerate's options and variables choose."""

from typing import Any

from accel_testing import RankPool

VARIABLES = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}


def opened() -> tuple[str, Any, bool]:
    from accel_compat.facade.accelerator import CompatAccelerator as Accelerator
    from accel_compat.options.handlers import CompatDDPKwargs
    from accel_compat.state.accelerator_state import SharedAcceleratorState

    try:
        accelerator = Accelerator(kwargs_handlers=[CompatDDPKwargs(find_unused_parameters=True)])
        backend = accelerator._backend
        return accelerator.distributed_type.value, type(backend).__name__, backend.config.find_unused_parameters
    finally:
        SharedAcceleratorState._reset_state(reset_partial_state=True)


def test_on_the_cpu_ddp_trains_with_its_options_where_deepspeed_is_asked_for(rank_pool: RankPool) -> None:
    assert rank_pool.run(opened, ranks=2, variables=VARIABLES) == [("MULTI_CPU", "DDPBackend", True)] * 2
