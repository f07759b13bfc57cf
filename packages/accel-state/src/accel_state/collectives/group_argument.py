"""Resolution of the ``group`` argument of collectives."""

import atexit
import functools
import time
from typing import TYPE_CHECKING

from accel_state.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Seconds that gloo's threads need to release the tensors of a finished collective.
GLOO_SETTLES = 0.05
# Backend of a fake process group, of which only this rank exists (see ``process_group.fake_group``).
FAKE = "accelfake"


def resolve(group: "ProcessGroup | None" = None) -> "ProcessGroup | None":
    """Returns ``group``, or torch's default group; None if there is no group or the group has a single rank.

    A group of one rank counts as no group, so that a program behaves the same whether or not its only process was
    launched with a group.

    Raises CollectiveError when this process is not a member of ``group``.
    """
    if group is None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
        assert group is not None
    elif not hasattr(group, "size"):  # new_group returns a placeholder int to non-members
        raise CollectiveError("this process is not a member of the given process group; only its members may call")
    if group.size() == 1:
        return None
    _settle_at_exit()
    return group


def is_fake(group: "ProcessGroup | None") -> bool:
    """Whether a group is fake: of its ranks only this one exists. None: torch's default group, if one is open."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    return str(dist.get_backend(group)) == FAKE


@functools.cache
def _settle_at_exit() -> None:
    """Registers, once, a wait at exit until gloo's threads have released the last collective's tensors.

    A thread that releases a tensor acquires the GIL, which aborts the process if the interpreter is already finalizing.
    ``destroy_process_group`` does not prevent this: torch keeps the group alive if the process has created an
    optimizer.
    """
    atexit.register(time.sleep, GLOO_SETTLES)
