"""Options of tensor parallelism under Accelerate's name."""

import logging

from accel_state.parallelism.axis_options import TorchTensorParallelConfig


def test_asynchronous_tensor_parallelism_is_ignored_with_a_warning(caplog):
    from accelerate.utils import TorchTensorParallelConfig as options_of

    with caplog.at_level(logging.WARNING):
        made = options_of(enable_async_tp=True)
    assert made == TorchTensorParallelConfig()
    assert "ignoring" in caplog.text
