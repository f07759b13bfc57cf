"""Options of tensor parallelism: accel's, with an option of Accelerate that has no effect."""

import logging
import warnings
from typing import Any

from accel.utils.dataclasses import ParallelismConfig, TorchTensorParallelConfig, TorchTensorParallelPlugin

LOG = logging.getLogger("accelerate.utils.dataclasses")


def tensor_parallel_options(enable_async_tp: bool = False, **options: Any) -> TorchTensorParallelConfig:
    """Returns accel's options. ``enable_async_tp`` is ignored with a warning, as Accelerate does."""
    if enable_async_tp:
        LOG.warning("Async tensor parallelism is currently not supported, ignoring this option.")
    return TorchTensorParallelConfig(**options)


def degrees_with_plugin(
    parallelism: ParallelismConfig | None, plugin: TorchTensorParallelPlugin | None
) -> ParallelismConfig | None:
    """Returns the degrees of a run; the plugin is deprecated, and counts where no degrees are given, as in Accelerate.

    Raises:
        ValueError: both give degrees of tensor parallelism, and these differ.
    """
    if plugin is None:
        return parallelism
    warnings.warn(
        f"torch_tp_plugin is deprecated; use parallelism_config=ParallelismConfig(tp_size={plugin.tp_size})",
        FutureWarning,
        stacklevel=3,
    )
    if parallelism is None:
        return ParallelismConfig(tp_size=plugin.tp_size)
    if parallelism.tp_size != plugin.tp_size:
        raise ValueError(
            f"parallelism_config has tp_size={parallelism.tp_size}, and torch_tp_plugin says {plugin.tp_size}; leave "
            "one of them out"
        )
    return parallelism
