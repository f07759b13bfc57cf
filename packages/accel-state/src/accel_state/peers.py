"""Whom a collective is with."""

from typing import TYPE_CHECKING

from accel_state.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    return group if group.size() > 1 else None
