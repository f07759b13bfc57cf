"""Division of work between ranks: some ranks before the others, on one rank only, or a shard on each rank."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from accel_state.errors import CollectiveError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.device.device import Device

P = ParamSpec("P")
R = TypeVar("R")


def run_only(
    condition: Callable[[], bool], function: Callable[P, R] | None
) -> Callable[P, R | None] | Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorates ``function`` to run only if ``condition()`` is true at the call; otherwise the call returns None.

    Without ``function``, returns the decorator itself.
    """
    if function is None:
        return lambda given: _only(condition, given)
    return _only(condition, function)


def _only(condition: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if condition() else None

    return wrapper


@contextmanager
def first(goes_first: bool, group: "ProcessGroup | None") -> Iterator[None]:
    """Runs the block on the ranks for which ``goes_first`` is true, before it runs on the other ranks.

    Collective: every rank of the group must call this. If the block fails on a first rank, the other ranks do not enter
    the block; they raise ``accel_state.errors.CollectiveError`` with that rank and its error.
    """
    from accel_state.collectives.tensors import agree

    if group is None:
        yield
        return
    if not goes_first:
        agree(None, group=group)
        yield
        return
    try:
        yield
    except BaseException as error:
        # The error of the block is raised here, even if reporting it to the other ranks fails.
        with suppress(Exception):
            agree(error if isinstance(error, Exception) else CollectiveError(repr(error)), group=group)
        raise
    agree(None, group=group)


@recorded("wait_for_everyone")
def barrier(group: "ProcessGroup", device: "Device") -> None:
    """Returns once every rank of ``group`` has called it.

    Collective: every rank of the group must call this.

    Raises:
        CollectiveError: a rank did not call within the group's timeout, or has ended.
    """
    import torch.distributed as dist

    try:
        dist.barrier(group, device_ids=device.barrier_devices)
    except RuntimeError as error:
        raise CollectiveError(f"wait_for_everyone: some process did not come: {error}") from error


def split(inputs: Any, *, rank: int, world_size: int, padding: bool = False) -> Any:
    """Returns the contiguous shard of ``inputs`` for ``rank``; ``inputs`` itself is not changed.

    Lengths differ by at most one; the first ranks get the longer shards. Lists, tuples, ranges, tensors and numpy
    arrays (along dim 0) and Hugging Face datasets are sliced; mappings and namedtuples are sliced value by value; other
    objects (a string) are returned as they are. With ``padding`` every shard has the length of the longest (that of a
    range is then a list): the last ranks repeat the last item of ``inputs``, so that the gathered shards, truncated to
    the original length, equal ``inputs``. A single process gets ``inputs`` itself.

    Raises:
        ValueError: the values of a mapping or namedtuple have different lengths.
    """
    if world_size == 1:
        return inputs
    length = _length(inputs)
    if length is None:
        return inputs
    share, longer = divmod(length, world_size)
    if padding:
        wanted = share + (longer > 0)
        start, stop = min(rank * wanted, length), min((rank + 1) * wanted, length)
        return _cut(inputs, start, stop, repeat_last=wanted - (stop - start))
    start = rank * share + min(rank, longer)
    return _cut(inputs, start, start + share + (rank < longer), repeat_last=0)


def _length(inputs: Any) -> int | None:
    values = _values(inputs)
    if values is None:
        return len(inputs) if _is_cut(inputs) else None
    lengths = {
        name: length for name, length in ((name, _length(value)) for name, value in values) if length is not None
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all values to split must have the same length; got {lengths}")
    return next(iter(lengths.values()), None)


def _values(inputs: Any) -> list[tuple[Any, Any]] | None:
    """Returns names and values of a mapping or namedtuple; None for other objects."""
    if isinstance(inputs, Mapping):
        return list(inputs.items())
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return list(zip(inputs._fields, inputs, strict=True))
    return None


def _is_cut(inputs: Any) -> bool:
    if isinstance(inputs, torch.Tensor) or _is_a("numpy", "ndarray", inputs):
        return bool(inputs.ndim)
    return isinstance(inputs, list | tuple | range) or _is_a("datasets", "Dataset", inputs)


def _is_a(module: str, name: str, inputs: Any) -> bool:
    """Whether ``inputs`` is an instance of a class of a module, which is not imported for the question."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(inputs, getattr(loaded, name, ()))


def _cut(inputs: Any, start: int, stop: int, *, repeat_last: int) -> Any:
    if isinstance(inputs, Mapping):
        part = {name: _cut(value, start, stop, repeat_last=repeat_last) for name, value in inputs.items()}
        if type(inputs) is dict:
            return part
        rebuilt: Any = copy.copy(inputs)
        for name, value in part.items():
            rebuilt[name] = value
        return rebuilt
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(_cut(value, start, stop, repeat_last=repeat_last) for value in inputs))
    if not _is_cut(inputs):
        return inputs
    repeat_last = repeat_last if len(inputs) else 0
    if _is_a("datasets", "Dataset", inputs):
        return inputs.select([*range(start, stop), *[len(inputs) - 1] * repeat_last])
    if not repeat_last:
        return inputs[start:stop]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([inputs[start:stop], inputs[-1:].expand(repeat_last, *inputs.shape[1:])])
    if isinstance(inputs, list | tuple | range):
        items: Any = list(inputs) if isinstance(inputs, range) else inputs
        return items[start:stop] + items[-1:] * repeat_last
    return inputs.take(range(start, stop + repeat_last), axis=0, mode="clip")
