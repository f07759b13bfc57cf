"""Process group of a loader, separate from the groups of the step."""

import os
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, final

from accel_state.errors import DataError
from accel_state.parallelism.config import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LIFETIME = timedelta(days=365)
"""Timeout of the group's operations. A receive may wait through the user's evaluation, checkpoint or breakpoint; the
wait of the loop for a batch has a limit of its own."""


@final
@dataclass(frozen=True, slots=True)
class LoaderGroup:
    """Process group of one loader, and the data shard of each of its ranks.

    The group is private to the loader. A loader communicates in its own threads while the step runs collectives on the
    user's groups; on a shared group the order of operations would differ between ranks. It is a gloo group on every
    device type, because batches are in host memory before they are copied to the device.
    """

    group: "ProcessGroup"
    rank: int
    parts: tuple[int, ...]
    """By rank of the group, the index of its shard: equal for ranks that read the same data."""
    patience: float | None
    """Seconds for which the loop waits for a batch before it raises; None: no limit."""


def connect(owner: object, shard: DataShard, group: "ProcessGroup | None") -> LoaderGroup | None:
    """Creates the group of one loader, which lives as long as ``owner``; None without other processes.

    Collective: every rank of the group must call this. ``group`` defaults to the default group, if one is open.

    Raises ``DataError`` on every rank if the ranks' shards do not cover the full data.
    """
    import torch.distributed as dist

    from accel_state.collectives.group_argument import is_fake
    from accel_state.collectives.objects import all_gather_object
    from accel_state.process_group.group import default_group, read_timeout, sibling_group

    whole = group if group is not None else default_group()
    if whole is None or whole.size() == 1:
        return None
    limit = read_timeout(whole)
    own = sibling_group(whole, backend="gloo", timeout=_LIFETIME)
    weakref.finalize(owner, _destroy, own, os.getpid()).atexit = False
    if is_fake(whole):  # the other ranks do not exist: neighbours read the same shard
        shares = _assumed(shard, dist.get_rank(own), own.size())
    else:
        shares = all_gather_object((shard.index, shard.count), group=own)
    if {index for index, _ in shares} != set(range(shard.count)) or any(count != shard.count for _, count in shares):
        raise DataError(
            f"the ranks of one loader were given shards {', '.join(f'{i} of {n}' for i, n in shares)}; "
            f"together they must be 0 to {shard.count - 1} of {shard.count}"
        )
    return LoaderGroup(
        own, dist.get_rank(own), tuple(i for i, _ in shares), None if limit is None else limit.total_seconds()
    )


def _assumed(shard: DataShard, rank: int, size: int) -> list[tuple[int, int]]:
    """Data shards of all ranks, of which only ``rank`` exists: neighbours read the same one, each shard is read.

    ``rank`` reads ``shard``; a rank that would read it reads the other one instead.
    """
    indices = [one * shard.count // size for one in range(size)]
    other = indices.index(shard.index)
    indices[other], indices[rank] = indices[rank], indices[other]
    return [(index, shard.count) for index in indices]


def _destroy(group: "ProcessGroup", process: int) -> None:
    """Ends a group in the process that made it.

    A forked worker has a copy of every loader of its parent, and its garbage collector may free one. The threads of
    the group are the parent's only: a worker that ended its copy would wait for them without end, or crash.
    """
    if os.getpid() != process:
        return
    import torch.distributed as dist

    from accel_state.private import is_open

    if is_open(group):
        dist.destroy_process_group(group)
