"""Options of tensor parallelism: accel's, with an option of Accelerate that has no effect."""

import logging
from typing import Any

from accel.utils.dataclasses import TorchTensorParallelConfig

LOG = logging.getLogger("accelerate.utils.dataclasses")


def tensor_parallel_options(enable_async_tp: bool = False, **options: Any) -> TorchTensorParallelConfig:
    """Returns accel's options. ``enable_async_tp`` is ignored with a warning, as Accelerate does."""
    if enable_async_tp:
        LOG.warning("Async tensor parallelism is currently not supported, ignoring this option.")
    return TorchTensorParallelConfig(**options)
