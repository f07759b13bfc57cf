"""Comparisons of what ranks of several machines do together, before anything depends on it."""

from typing import TYPE_CHECKING, final

import torch

from accel_state.watchdog.diagnosis import RankState, first_difference
from accel_state.watchdog.operation_record import Record, decode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


@final
class Comparison:
    """The operations of all ranks, compared by their digest: begun at one operation, read before the next.

    Ranks of one machine compare each operation in memory. Between machines that would take a message each, so what is
    compared is the digest of all operations so far, over a group of the processors, which waits for no device.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        self._group = group
        self._pending: tuple[Work, list[torch.Tensor]] | None = None

    @property
    def pending(self) -> bool:
        """A comparison was begun and not read yet."""
        return self._pending is not None

    def begin(self, record: Record) -> None:
        """Sends the digest of this rank's operations. Collective."""
        self._pending = self._gather(torch.tensor([record.sequence, record.trail]))

    def difference(self, record: Record) -> str | None:
        """What the ranks did differently, once all have begun the comparison; None if they did the same."""
        assert self._pending is not None
        (work, digests), self._pending = self._pending, None
        work.wait()
        if all(torch.equal(digest, digests[0]) for digest in digests):
            return None
        work, images = self._gather(torch.frombuffer(bytearray(record.image()), dtype=torch.uint8))
        work.wait()
        snapshots = [decode(image.numpy().tobytes()) for image in images]
        states = [RankState(rank, "alive", 0.0, snapshot) for rank, snapshot in enumerate(snapshots)]
        lines = first_difference(states) or [f"rank {rank} is at {one.said}" for rank, one in enumerate(snapshots)]
        return "the ranks entered different operations:\n  " + "\n  ".join(lines)

    def _gather(self, mine: torch.Tensor) -> "tuple[Work, list[torch.Tensor]]":
        import torch.distributed as dist

        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        work = dist.all_gather(gathered, mine, group=self._group, async_op=True)
        assert work is not None
        return work, gathered
