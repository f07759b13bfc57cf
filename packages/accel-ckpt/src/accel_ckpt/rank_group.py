"""The ranks that save or load one checkpoint together: their collective work, and failures of one raised on all."""

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
    """The ranks of ``group`` on machines that share no disk, so that each machine keeps a whole copy of its own.

    Takes the place of a group wherever one is given. ``node`` says on which machine this rank is: ranks with the same
    number see the same files, the lowest of them keeps the machine's copy. Made by all ranks together.
    """

    def __init__(self, group: "ProcessGroup | None" = None, *, node: int) -> None:
        found = resolve(group)
        self.group = found if found is None or sends_from_host(found) else host_group(found)
        self.nodes: tuple[int, ...] = tuple(all_gather_object(node, group=found)) if found is not None else (node,)


Ranks: TypeAlias = Union["ProcessGroup", PerNode, "RankGroup", None]
"""Who saves or loads together: the ranks of a group (None: of torch's default group) with or without a common disk."""


@final
class RankGroup:
    """This rank among those of ``group``; without a group it is alone and nothing is sent.

    ``nodes`` has, for each rank, the machine whose disk it sees; None: all see the same.
    """

    def __init__(self, group: "ProcessGroup | None", nodes: tuple[int, ...] | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.nodes = (0,) * self.size if nodes is None else nodes
        self.keeper = self.nodes.index(self.nodes[self.rank])
        """The rank that keeps the copy that this one sees: makes, commits and removes folders there."""
        self.keepers = tuple(sorted({self.nodes.index(node) for node in self.nodes}))
        self.neighbours = tuple(rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank])
        """The ranks that see the same copy, this one among them."""

    @classmethod
    def of(cls, group: Ranks) -> "RankGroup":
        """The ranks of ``group``, or of torch's default group if there is one."""
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
        except Exception as lost:  # of several types where the group was destroyed here
            raise error or CheckpointError(f"{what}: {_LOST}: {lost}") from lost
        if error is not None:
            raise error
        failed = {rank: message for rank, (message, _) in enumerate(told) if message is not None}
        if failed:
            text = "; ".join(f"rank {rank} failed with {message}" for rank, message in failed.items())
            raise relayed(CheckpointError(f"{what}: {text}"))
        return [value for _, value in told]

    def at_first(self, what: str, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Every rank does ``work``, and rank 0 alone ``then`` with all results; if any of it fails, every rank raises.

        Large results travel to rank 0 only. The agreement behind them carries failures.
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
                raise error or CheckpointError(f"{what}: {_LOST}: {lost}") from lost

        def follow() -> None:
            if error is not None:
                raise error
            if told is not None and all(done for done, _ in told):
                then([value for _, value in told])

        self.together(what, follow)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """The keeper of each copy does ``work``; all ranks get their keeper's result, or any keeper's failure."""
        return self.together(what, lambda: work() if self.keeps else None)[self.keeper]  # type: ignore[return-value]

    def each_copy(self, what: str, work: Callable[[], T]) -> list[T]:
        """As ``first``, but all ranks get the results of all keepers, in order of rank."""
        told = self.together(what, lambda: work() if self.keeps else None)
        return [told[rank] for rank in self.keepers]  # type: ignore[misc]


def host_group(group: "ProcessGroup") -> "ProcessGroup":
    """Another group of the same ranks, for tensors in the host's memory. Collective."""
    from accel_state.process_group.group import sibling_group

    return sibling_group(group, backend="gloo")


def sends_from_host(group: "ProcessGroup") -> bool:
    """Whether tensors in the host's memory can be sent in ``group``."""
    import torch.distributed as dist

    return "cpu:" in str(dist.get_backend_config(group))
