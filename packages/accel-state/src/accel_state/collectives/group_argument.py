"""The group of a collective."""

import atexit
import functools
import time
from typing import TYPE_CHECKING

from accel_state.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Seconds that gloo's threads need to release the tensors of a collective that has ended.
GLOO_SETTLES = 0.05


def resolve(group: "ProcessGroup | None" = None) -> "ProcessGroup | None":
    """The group to talk in: ``group``, or torch's default one; None when there is nobody to talk to.

    A group of one is nobody, so that a program does the same whether or not its only process was launched with a group.

    Raises CollectiveError when this process is not a member of ``group``.
    """
    if group is None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
        assert group is not None
    elif not hasattr(group, "size"):  # what new_group returns to those it leaves out
        raise CollectiveError("this process is not a member of the given process group; only its members may call")
    if group.size() == 1:
        return None
    _settle_at_exit()
    return group


@functools.cache
def _settle_at_exit() -> None:
    """Registers, once, a wait at exit until gloo's threads have released the last collective's tensors.

    A thread that releases a tensor takes the interpreter's lock, and aborts the process if the interpreter is already
    finalizing. ``destroy_process_group`` does not prevent it: torch keeps a group whose process has made an optimizer.
    """
    atexit.register(time.sleep, GLOO_SETTLES)
