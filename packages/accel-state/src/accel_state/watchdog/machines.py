"""Comparison of collectives between ranks of several machines, before results depend on them."""

from typing import TYPE_CHECKING, final

import torch

from accel_state.watchdog.diagnosis import RankState, first_difference
from accel_state.watchdog.operation_record import Record, decode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


@final
class MachineComparison:
    """Compares the collectives of all ranks by a digest; started at one operation, read before the next.

    Ranks of one machine compare each operation through shared memory. Between machines that would need a message per
    operation, so the digest of all operations so far is all-gathered instead, over a CPU group, which waits for no
    device.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        self._group = group
        self._pending: tuple[Work, list[torch.Tensor]] | None = None

    @property
    def pending(self) -> bool:
        """Whether a comparison was started and not read yet."""
        return self._pending is not None

    def begin(self, record: Record) -> None:
        """Starts an all-gather of the digest of this rank's operations.

        Collective: every rank of the group must call this.
        """
        self._pending = self._gather(torch.tensor([record.sequence, record.trail]))

    def difference(self, record: Record) -> str | None:
        """Waits for the comparison; returns the operations in which the ranks differ, or None if all digests are equal.

        Collective: every rank of the group must call this.
        """
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
