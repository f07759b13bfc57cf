"""Ranks that save or load one checkpoint together: their collectives, with errors of one rank raised on all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, final

from accel_state.collectives.group_argument import resolve
from accel_state.collectives.objects import gather_at_first
from accel_state.collectives.tensors import all_gather_object
from accel_state.errors import AccelError, CheckpointError, relayed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_LOST = "a rank is gone or does not answer, or the process group was destroyed"


@final
class PerNode:
    """The ranks of ``group`` on machines without a shared disk, so that each machine keeps a full copy of a checkpoint.

    Accepted wherever a group is. ``node`` is the number of this rank's machine: ranks with the same number see the same
    files, and the lowest of them is the keeper of the machine's copy.

    Collective: every rank of the group must call this.
    """

    def __init__(self, group: "ProcessGroup | None" = None, *, node: int) -> None:
        found = resolve(group)
        from accel_state.process_group.group import sends_from_host

        self.group = found if found is None or sends_from_host(found) else host_group(found)
        self.nodes: tuple[int, ...] = tuple(all_gather_object(node, group=found)) if found is not None else (node,)


Ranks: TypeAlias = Union["ProcessGroup", PerNode, "RankGroup", None]
"""Ranks that save or load together: those of a group (None: torch's default group), with or without a shared disk."""


@final
class RankGroup:
    """This rank among those of ``group``; without a group there is one rank and no communication.

    ``nodes`` has, for each rank, the number of the machine whose disk it sees; None: all ranks see the same disk.
    """

    def __init__(self, group: "ProcessGroup | None", nodes: tuple[int, ...] | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.nodes = (0,) * self.size if nodes is None else nodes
        self.keeper = self.nodes.index(self.nodes[self.rank])
        """Rank that keeps the copy that this rank sees: it creates, commits and removes folders there."""
        self.keepers = tuple(sorted({self.nodes.index(node) for node in self.nodes}))
        self.neighbours = tuple(rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank])
        """Ranks that see the same copy, including this one."""

    @classmethod
    def of(cls, group: Ranks) -> "RankGroup":
        """Returns the ranks of ``group``; for None, those of torch's default group if there is one."""
        if isinstance(group, RankGroup):
            return group
        if isinstance(group, PerNode):
            return cls(group.group, group.nodes)
        return cls(resolve(group))

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps a copy."""
        return self.keeper == self.rank

    def group_rank(self, global_rank: int) -> int:
        """Converts a global rank to a rank of this group."""
        if self.group is None:
            return 0
        import torch.distributed as dist

        return dist.get_group_rank(self.group, global_rank)

    def run_on_all(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs ``work`` on every rank and returns all results; if it fails on any rank, every rank raises.

        Collective: every rank of the group must call this. A failing rank raises its own error, the others a
        CheckpointError with the failed ranks and their messages, so that ``except CheckpointError`` is entered on all
        ranks or on none. If the other ranks cannot be reached, the CheckpointError has both messages.
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
        except Exception as lost:  # of various types if the group was destroyed in this process
            raise _lost(what, lost, error) from (error or lost)
        if error is not None:
            raise error
        failed = {rank: message for rank, (message, _) in enumerate(told) if message is not None}
        if failed:
            text = "; ".join(f"rank {rank} failed with {message}" for rank, message in failed.items())
            raise relayed(CheckpointError(f"{what}: {text}"))
        return [value for _, value in told]

    def gather_to_first(self, what: str, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Runs ``work`` on every rank and ``then(results)`` on rank 0; if any of it fails, every rank raises.

        Collective: every rank of the group must call this. Results are sent to rank 0 only, because they may be large;
        the ``run_on_all`` that follows exchanges errors.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        told: list[Any] | None = [(error is None, result)]
        if self.group is not None:
            try:
                told = gather_at_first((error is None, result), group=self.group)
            except AccelError:
                raise
            except Exception as lost:
                raise _lost(what, lost, error) from (error or lost)

        def follow() -> None:
            if error is not None:
                raise error
            if told is not None and all(done for done, _ in told):
                then([value for _, value in told])

        self.run_on_all(what, follow)

    def run_on_keeper(self, what: str, work: Callable[[], T]) -> T:
        """Runs ``work`` on the keeper of each copy; returns this rank's keeper's result, or raises any keeper's error.

        Collective: every rank of the group must call this.
        """
        return self.run_on_all(what, lambda: work() if self.keeps else None)[self.keeper]  # type: ignore[return-value]

    def run_on_each_keeper(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs ``work`` on the keeper of each copy; returns the results of all keepers, in order of rank.

        Collective: every rank of the group must call this.
        """
        told = self.run_on_all(what, lambda: work() if self.keeps else None)
        return [told[rank] for rank in self.keepers]  # type: ignore[misc]


def _lost(what: str, lost: Exception, error: Exception | None) -> CheckpointError:
    """Error of a rank that cannot reach the others; its own ``error`` may be a consequence, or the cause."""
    own = "" if error is None else f"{type(error).__name__}: {error}; "
    return CheckpointError(f"{what}: {own}{_LOST}: {lost}")


def host_group(group: "ProcessGroup") -> "ProcessGroup":
    """Creates another group of the same ranks, for CPU tensors.

    Collective: every rank of the group must call this.
    """
    from accel_state.process_group.group import sibling_group

    return sibling_group(group, backend="gloo")
