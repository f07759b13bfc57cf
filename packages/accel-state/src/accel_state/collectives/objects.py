"""Collectives over Python objects, and errors raised on all ranks together.

Objects are pickled for the transfer between live processes of one group; nothing pickled is ever stored.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from accel_state.collectives.group_argument import resolve
from accel_state.collectives.verify import is_verified, verify_collective
from accel_state.errors import CollectiveError, relayed
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@recorded("all_gather_object")
def all_gather_object(obj: Any, *, group: "ProcessGroup | None" = None, verify: bool | None = None) -> list[Any]:
    """Returns ``obj`` of every rank, in order of rank, on every rank; a list of one object without a group.

    Collective: every rank of the group must call this. With ``verify``, a rank that enters another collective causes an
    error on every rank instead of a hang.
    """
    group = resolve(group)
    if group is None:
        return [obj]
    if is_verified(verify):
        verify_collective("all_gather_object", None, group)
    from accel_state.collectives.pickled import gather_pickled

    return gather_pickled(obj, group)


@recorded("gather_at_first")
def gather_at_first(obj: Any, *, group: "ProcessGroup | None" = None) -> list[Any] | None:
    """Gathers ``obj`` of every rank, in order of rank, on rank 0; None on other ranks; a list of one without a group.

    Collective: every rank of the group must call this.
    """
    group = resolve(group)
    if group is None:
        return [obj]
    if is_verified(None):
        verify_collective("gather_at_first", None, group)
    from accel_state.collectives.pickled import gather_pickled_at_first

    return gather_pickled_at_first(obj, group)


@recorded("gather_object")
def gather_object(object: Any, *, group: "ProcessGroup | None" = None, verify: bool | None = None) -> Any:
    """Returns the lists of all ranks, concatenated in order of rank, on every rank; without a group its argument.

    Collective: every rank of the group must call this.

    Raises:
        TypeError: ``object`` is not a list, but a dict, a string or a single object.
    """
    if isinstance(object, (Mapping, str, bytes)) or not isinstance(object, Iterable):
        raise TypeError(
            f"gather_object joins the lists of all processes, but got {type(object)}; put it into a list, or use "
            "all_gather_object for one object of each process"
        )
    group = resolve(group)
    if group is None:
        return object
    return [item for items in all_gather_object(list(object), group=group, verify=verify) for item in items]


@recorded("broadcast_object_list", lambda objects, from_process=0, **_: f"{len(objects)} objects, {from_process}")
def broadcast_object_list(
    object_list: list[Any],
    from_process: int = 0,
    *,
    group: "ProcessGroup | None" = None,
    verify: bool | None = None,
) -> list[Any]:
    """Overwrites the items of ``object_list`` in place by those of rank ``from_process`` of the group, and returns it.

    Collective: every rank of the group must call this.

    Raises:
        CollectiveError: on a rank whose list has another length.
    """
    group = resolve(group)
    if group is None:
        return object_list
    from accel_state.collectives.pickled import broadcast_pickled

    check_rank(from_process, group)
    if is_verified(verify):
        arguments = {"from_process": from_process, "length": len(object_list)}
        verify_collective("broadcast_object_list", None, group, arguments=arguments)
    found = broadcast_pickled(object_list, from_process, group)
    if len(found) != len(object_list):
        raise CollectiveError(
            f"broadcast_object_list of {len(object_list)} objects, but process {from_process} sent {len(found)}; "
            "give a list of the same length everywhere"
        )
    object_list[:] = found
    return object_list


@recorded("agree")
def agree(error: Exception | None, *, group: "ProcessGroup | None" = None, note: T | None = None) -> list[T | None]:
    """Raises on every rank if any rank passes an error.

    Collective: every rank of the group must call this. It follows work that can fail on a single rank. A rank with an
    error raises that error; the other ranks raise a CollectiveError that lists the failed ranks with their errors, so
    that no rank waits for a failed one.

    Returns:
        The ``note`` of each rank, in order of rank, if no rank has an error.
    """
    world = resolve(group)
    if world is not None and is_verified(None):
        verify_collective("agree", None, world)
    said = None if error is None else f"{type(error).__name__}: {error}"
    told = all_gather_object((said, note), group=group, verify=False)
    if error is not None:
        raise error
    failed = {rank: message for rank, (message, _) in enumerate(told) if message is not None}
    if failed:
        text = "; ".join(f"process {rank} failed with {message}" for rank, message in failed.items())
        raise relayed(CollectiveError(text))
    return [noted for _, noted in told]


def check_rank(rank: int, group: "ProcessGroup") -> None:
    """Raises ValueError unless ``rank`` is a rank of the group."""
    if not 0 <= rank < group.size():
        raise ValueError(f"from_process={rank} is not a process of this group; expected 0 to {group.size() - 1}")
