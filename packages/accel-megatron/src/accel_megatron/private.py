"""Private names of torch and megatron-core that this package uses, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from queue import Queue
from typing import Any

import torch


def publish_main_weights(optimizer: Any) -> None:
    """Copies the master weights of one of Megatron-LM's optimizers into the model's 16-bit weights."""
    optimizer._copy_main_params_to_model_params()


def shard_span(optimizer: Any, parameter: torch.Tensor) -> tuple[int, int]:
    """Returns where this rank's shard of a flattened parameter begins and ends, in a distributed optimizer."""
    span = optimizer._get_model_param_range_map(parameter)["param"]
    return span.start, span.end


@contextmanager
def without_writer_process() -> Iterator[None]:
    """Context in which megatron-core collects the results of a synchronous save in a queue of this process.

    Otherwise it starts a process for that queue, which imports the user's script again and runs until the end.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue
    filesystem_async._results_queue = Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
        active_children()  # collects the writers that have ended, which megatron-core does not do after a failure
