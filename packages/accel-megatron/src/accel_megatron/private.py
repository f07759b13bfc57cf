"""Private names of torch and megatron-core that this package uses, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from queue import Queue

from torch._C._distributed_c10d import HashStore as HashStore


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
