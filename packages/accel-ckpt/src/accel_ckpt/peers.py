"""The ranks that save or load one checkpoint together, and how a failure of one reaches all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, final

from accel_state.collectives import all_gather_object
from accel_state.errors import AccelError, CheckpointError
from accel_state.peers import resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@final
class Peers:
    """This rank among those of ``group``; without a group it is alone and nothing is sent."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of(cls, group: "ProcessGroup | None") -> "Peers":
        """The ranks of ``group``, or of torch's default group if there is one."""
        return cls(resolve(group))

    def group_rank(self, global_rank: int) -> int:
        """This group's number for a process."""
        if self.group is None:
            return 0
        import torch.distributed as dist

        return dist.get_group_rank(self.group, global_rank)

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Every rank does ``work`` and learns all results; if any fails, every rank raises.

        The failing rank raises its own error, the others a CheckpointError with the ranks and what they said, so that
        ``except CheckpointError`` is taken on all ranks or on none.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        if self.group is None:
            if error is not None:
                raise error
            return [result]
        said = None if error is None else f"{type(error).__name__}: {error}"
        try:
            told = all_gather_object((said, None if error is not None else result), group=self.group)
        except AccelError:
            raise
        except RuntimeError as lost:
            raise error or CheckpointError(f"{what}: a rank is gone or does not answer: {lost}") from lost
        if error is not None:
            raise error
        failed = {rank: message for rank, (message, _) in enumerate(told) if message is not None}
        if failed:
            raise CheckpointError(
                f"{what}: " + "; ".join(f"rank {rank} failed with {message}" for rank, message in failed.items())
            )
        return [value for _, value in told]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Rank 0 does ``work`` and all ranks get its result, or its failure."""
        return self.together(what, lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]
