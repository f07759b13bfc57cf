"""Call in one of several processes, with the variables that a launcher would set for its rank."""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accel_state.enums import DistributedType


class PrepareForLaunch:
    """Calls ``launcher`` as a process of a run; an instance is what ``torch.multiprocessing.spawn`` and forks call.

    Args:
        launcher: the function; its result is dropped.
        distributed_type: kind of the run; with one of several processes, ``LOCAL_RANK`` and ``RANK`` are set from the
            process's number, ``NPROC`` and ``NODE_RANK``.
        debug: open a process group of gloo over the file in ``ACCELERATE_DEBUG_RDV_FILE``, with ``WORLD_SIZE`` ranks.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str | DistributedType = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Calls the function with ``args`` in the process of this number.

        Raises:
            KeyError: with ``debug``, a variable is missing.
        """
        if self.debug:
            world_size = int(os.environ["WORLD_SIZE"])
            meeting = f"file://{os.environ['ACCELERATE_DEBUG_RDV_FILE']}"
            dist.init_process_group("gloo", init_method=meeting, rank=index, world_size=world_size)
        elif self.distributed_type.value.startswith("MULTI_"):
            first = int(os.environ.get("NPROC", 1)) * int(os.environ.get("NODE_RANK", 0))
            os.environ.update(LOCAL_RANK=str(index), RANK=str(first + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
