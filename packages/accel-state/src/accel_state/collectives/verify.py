"""Verification, before a collective runs, that all ranks enter the same one with matching data.

A collective with mismatched ranks hangs, aborts the process or mixes up bytes. Verification raises an error on every
rank instead, with the ranks and leaves that differ. Each rank writes a description of its call into the store that the
group was opened with and reads the descriptions of the others; the group itself is not used and stays usable.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch

from accel_state.errors import CollectiveError, CollectiveMismatchError
from accel_state.pytree.structure import children, is_namedtuple, walk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
_PATH = "accel.utils.operations"
# After this long, a warning lists the missing ranks; the error follows at the timeout.
_IMPATIENT = timedelta(seconds=10)
_DEFAULT_TIMEOUT = timedelta(minutes=5)


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """Description of one leaf for the comparison: its path, and shape and dtype, or its type if it is not a tensor."""

    path: str
    dtype: str
    shape: list[int] | None
    device: str | None


@final
@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """Description of the collective that one rank is about to enter."""

    operation: str
    arguments: str
    containers: str
    shapes: str
    leaves: list[Leaf]
    device: str | None

    @property
    def signature(self) -> str:
        """The operation with its arguments, as a call expression."""
        return f"{self.operation}({self.arguments})"

    def to_json(self) -> str:
        """Serializes the call for the store, without pickle."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "CollectiveCall":
        """The inverse of ``to_json``."""
        found = json.loads(text)
        return cls(**{**found, "leaves": [Leaf(**leaf) for leaf in found["leaves"]]})


def is_verified(verify: bool | None) -> bool:
    """Returns ``verify`` if it is given; otherwise the ``debug`` flag of the open session."""
    if verify is not None:
        return verify
    module = sys.modules.get("accel_state.session")  # without the module there is no session
    session = None if module is None else module.Session.current()
    return session is not None and bool(session.debug)


def verify_collective(
    operation: str,
    data: Any,
    group: "ProcessGroup",
    *,
    arguments: Mapping[str, object] | None = None,
    exact_shapes: bool = True,
    timeout: timedelta | None = None,
) -> None:
    """Returns once all ranks of ``group`` are about to run the same operation on matching data.

    Collective: every rank of the group must call this. Compares operation and ``arguments``, containers, dtypes,
    devices (against the open session's device), and shapes; without ``exact_shapes`` only the number of dimensions.
    ``timeout`` defaults to the group's.

    Raises:
        CollectiveMismatchError: on every rank, naming the ranks and leaves that differ.
        CollectiveError: ranks are missing at the timeout; names them with their last verified operations.
    """
    mine = describe(operation, data, arguments or {})
    store = group.get_group_store()
    number = store.add(f"accel/count/{group.rank()}", 1)
    store.set(_key(number, group.rank()), mine.to_json())
    _wait_for_all(store, mine, number, group, timeout or _timeout(group))
    calls = [
        CollectiveCall.from_json(text) for text in store.multi_get([_key(number, rank) for rank in range(group.size())])
    ]
    if number > 1:  # all ranks are in this call, so all have read the previous key
        store.delete_key(_key(number - 1, group.rank()))
    problem = compare(calls, exact_shapes=exact_shapes)
    if problem is not None:
        raise CollectiveMismatchError(problem)


def describe(operation: str, data: Any, arguments: Mapping[str, object]) -> CollectiveCall:
    """Describes the call that this rank is about to make with ``data``."""
    session = None
    if "accel_state.session" in sys.modules:
        session = sys.modules["accel_state.session"].Session.current()
    return CollectiveCall(
        operation=operation,
        arguments=", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        containers=_containers(data),
        shapes=_shapes(data),
        leaves=[_leaf(path, leaf) for path, leaf in walk(data)],
        device=None if session is None else str(session.device.type),
    )


def _leaf(path: str, leaf: object) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        shape = None if leaf.is_nested else list(leaf.shape)
        return Leaf(path, str(leaf.dtype).removeprefix("torch."), shape, leaf.device.type)
    return Leaf(path, type(leaf).__name__, None, None)


def _containers(data: Any) -> str:
    parts = None if isinstance(data, torch.Tensor) else children(data)
    if parts is None:
        return "*"
    named = isinstance(data, Mapping) or not isinstance(data, (list, tuple)) or is_namedtuple(data)
    inside = [f"{key!r}: {_containers(value)}" if named else _containers(value) for key, value in parts]
    return f"{type(data).__name__}({', '.join(sorted(inside) if isinstance(data, Mapping) else inside)})"


def _shapes(data: Any) -> str:
    """Formats nested shapes: ``{'labels': [[2, 3]]}``."""
    if isinstance(data, torch.Tensor):
        return "nested tensor" if data.is_nested else str(list(data.shape))
    parts = children(data)
    if parts is None:
        return type(data).__name__
    if isinstance(data, (list, tuple)):
        return f"[{', '.join(_shapes(value) for _, value in parts)}]"
    return "{" + ", ".join(f"{key!r}: {_shapes(value)}" for key, value in parts) + "}"


def compare(calls: list[CollectiveCall], *, exact_shapes: bool = True) -> str | None:
    """Returns a report of the differences between the calls of ranks 0, 1, ..., or None if all of them match.

    The reference is the description that most ranks gave; at a tie, that of the lowest rank.
    """
    if len({call.signature for call in calls}) > 1:
        return "The processes called different operations:" + "".join(
            f"\n  - Process {rank}: {call.signature}" for rank, call in enumerate(calls)
        )
    usual = Counter(_fingerprint(call, exact_shapes) for call in calls).most_common(1)[0][0]
    reference = next(rank for rank, call in enumerate(calls) if _fingerprint(call, exact_shapes) == usual)
    found = [
        (kind, f"Process {rank} {text}")
        for rank, call in enumerate(calls)
        for kind, text in [
            *_differences(call, calls[reference], reference, exact_shapes=exact_shapes),
            *_strangers(call),
        ]
    ]
    if not found:
        return None
    kinds = {kind for kind, _ in found}
    subject = "shape" if "shape" in kinds else sorted(kinds)[0]
    return "\n".join(
        [
            f"Cannot apply desired operation due to {subject} mismatches. All {subject}s across devices must be valid.",
            "",
            f"Operation: `{_PATH}.{calls[0].operation}`",
            "Input shapes:",
            *(f"  - Process {rank}: {call.shapes}" for rank, call in enumerate(calls)),
            "Differences:",
            *(f"  - {text}" for _, text in found),
        ]
    )


def _fingerprint(call: CollectiveCall, exact_shapes: bool) -> str:
    leaves = [(leaf.path, leaf.dtype, _comparable(leaf, exact_shapes)) for leaf in call.leaves]
    return f"{call.containers} {leaves}"


def _comparable(leaf: Leaf, exact_shapes: bool) -> object:
    return leaf.shape if exact_shapes or leaf.shape is None else len(leaf.shape)


def _differences(
    call: CollectiveCall, reference: CollectiveCall, rank: int, *, exact_shapes: bool
) -> Iterator[tuple[str, str]]:
    """Yields ``(kind, text)`` of each difference between ``call`` and ``reference``, the call of process ``rank``."""
    ours = {leaf.path: leaf for leaf in call.leaves}
    theirs = {leaf.path: leaf for leaf in reference.leaves}
    for path in (path for path in theirs if path not in ours):
        yield "structure", f"has nothing at {path or 'the top'}, where process {rank} has {_text(theirs[path])}"
    for path in (path for path in ours if path not in theirs):
        yield "structure", f"has {_text(ours[path])} at {path or 'the top'}, where process {rank} has nothing"
    for path in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[path], theirs[path]
        if mine.dtype != other.dtype:
            yield "dtype", f"has {mine.dtype} at {path or 'the top'}, where process {rank} has {other.dtype}"
        if _comparable(mine, exact_shapes) != _comparable(other, exact_shapes):
            yield "shape", f"has shape {mine.shape} at {path or 'the top'}, where process {rank} has {other.shape}"
    if ours.keys() == theirs.keys() and call.containers != reference.containers:
        yield "structure", f"has the containers {call.containers}, where process {rank} has {reference.containers}"


def _strangers(call: CollectiveCall) -> Iterator[tuple[str, str]]:
    """Yields the leaves on another device type than that of their process's session."""
    for leaf in call.leaves:
        if leaf.device is not None and call.device is not None and leaf.device != call.device:
            yield (
                "device",
                f"has a tensor on {leaf.device} at {leaf.path or 'the top'}, but its session is configured for "
                f"{call.device}; move it there first",
            )


def _text(leaf: Leaf) -> str:
    return leaf.dtype if leaf.shape is None else f"{leaf.dtype}{leaf.shape}"


def _key(number: int, rank: int) -> str:
    return f"accel/call/{number}/{rank}"


def _timeout(group: "ProcessGroup") -> timedelta:
    from accel_state.process_group.group import read_timeout

    return read_timeout(group) or _DEFAULT_TIMEOUT


def _wait_for_all(store: "Store", mine: CollectiveCall, number: int, group: "ProcessGroup", timeout: timedelta) -> None:
    keys = [_key(number, rank) for rank in range(group.size())]
    first = min(_IMPATIENT, timeout)
    if _have_come(store, keys, first):
        return
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    _LOG.warning("%s has waited %g s for %s", mine.signature, first.total_seconds(), _last_seen(store, missing, number))
    if _have_come(store, keys, timeout - first):
        return
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        raise CollectiveError(
            f"{mine.signature} waited {timeout.total_seconds():g} s for {_last_seen(store, missing, number)}"
        )


def _have_come(store: "Store", keys: list[str], patience: timedelta) -> bool:
    """Returns whether all keys are set before ``patience`` ends.

    Polls, because a blocking wait would keep the store from torch's own threads and log its timeout as an error.
    """
    deadline, pause = time.monotonic() + patience.total_seconds(), 1e-4
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _last_seen(store: "Store", missing: list[int], number: int) -> str:
    """Lists the missing ranks with the last verified operation of each."""
    told = []
    for rank in missing:
        count = store.add(f"accel/count/{rank}", 0)
        known = count > 0 and store.check([_key(count, rank)])
        last = (
            f"last seen in {CollectiveCall.from_json(store.get(_key(count, rank))).signature}"
            if known
            else "never seen"
        )
        told.append(f"process {rank} ({last}; {count} of {number} verified operations)")
    return ", ".join(told)
