"""A process group of a loader's own, beside those of the step."""

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
"""The timeout of the group's own operations. A receive waits through the user's evaluation, checkpoint or breakpoint;
what must not take long is a batch the loop waits for, and that has a limit of its own."""


@final
@dataclass(frozen=True, slots=True)
class LoaderGroup:
    """The group of one loader, its own, and which rank of it has which share of the data.

    The group is used by nobody else. A loader talks while the step runs collectives on the user's groups, from threads
    of its own; on a shared group the two would meet in another order on each rank. It is a gloo group whatever the
    device: what travels is in host memory, as any loader's batches are before placement.
    """

    group: "ProcessGroup"
    rank: int
    parts: tuple[int, ...]
    """By rank of the group, the index of its share: equal for ranks that read the same data."""
    patience: float | None
    """Seconds the loop waits for a batch before it gives up; None: for ever."""


def connect(owner: object, shard: DataShard, group: "ProcessGroup | None") -> LoaderGroup | None:
    """The group of one loader, for as long as ``owner`` lives; None where there is no other process.

    Collective over ``group`` (None: the default group, when one is open).

    Raises ``DataError`` on every rank when the ranks' shares do not make up the whole.
    """
    import torch.distributed as dist

    from accel_state.collectives.objects import all_gather_object
    from accel_state.process_group.group import default_group, read_timeout, sibling_group

    whole = group if group is not None else default_group()
    if whole is None or whole.size() == 1:
        return None
    limit = read_timeout(whole)
    own = sibling_group(whole, backend="gloo", timeout=_LIFETIME)
    weakref.finalize(owner, _destroy, own, os.getpid()).atexit = False
    shares = all_gather_object((shard.index, shard.count), group=own)
    if {index for index, _ in shares} != set(range(shard.count)) or any(count != shard.count for _, count in shares):
        raise DataError(
            f"the ranks of one loader were given shards {', '.join(f'{i} of {n}' for i, n in shares)}; "
            f"together they must be 0 to {shard.count - 1} of {shard.count}"
        )
    return LoaderGroup(
        own, dist.get_rank(own), tuple(i for i, _ in shares), None if limit is None else limit.total_seconds()
    )


def _destroy(group: "ProcessGroup", process: int) -> None:
    """Ends a group in the process that made it.

    A forked worker has a copy of every loader of its parent, and its garbage collector may free one. The threads of
    the group are the parent's only: a worker that ended its copy would wait for them without end, or crash.
    """
    if os.getpid() != process:
        return
    import torch.distributed as dist

    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
