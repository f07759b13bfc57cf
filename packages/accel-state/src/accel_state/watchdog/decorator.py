"""The active watchdogs of this process, and the decorator that records an operation with them."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, final

from accel_state.errors import AccelError, CollectiveError

if TYPE_CHECKING:
    from accel_state.watchdog.monitor import Watchdog

P = ParamSpec("P")
R = TypeVar("R")

# torch has one default group per process, so its watchdog is per process too.
_active: "list[Watchdog]" = []
# Failures that ranks of the group reported before they stopped (rank -> message), used to explain later timeouts.
_troubles: dict[int, str] = {}
_OF_PEERS = ("connection", "broken pipe", "store", "peer", "gloo", "nccl", "timed out", "timeout", "socket", "rank")


def active() -> "Watchdog | None":
    """Returns the watchdog of this process, or None."""
    return _active[-1] if _active else None


def add(watchdog: "Watchdog") -> None:
    """Makes ``watchdog`` the active watchdog."""
    _active.append(watchdog)


def remove(watchdog: "Watchdog") -> None:
    """Removes ``watchdog`` from the active watchdogs."""
    _active[:] = [other for other in _active if other is not watchdog]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context in which no operation of this process is recorded or compared.

    For a block in which ranks may run different operations.
    """
    kept = _active[:]
    _active.clear()
    try:
        yield
    finally:
        _active[:] = kept


def troubled(rank: int, text: str) -> None:
    """Stores why another rank cannot continue; operations that wait for that rank include the text when they fail."""
    _troubles[rank] = text


def untroubled() -> None:
    """Clears all texts of ``troubled``: the ranks continue."""
    _troubles.clear()


def troubles() -> Mapping[int, str]:
    """Returns the reasons why ranks cannot continue, by rank."""
    return _troubles


def explain(error: Exception) -> None:
    """Replaces an error that a broken connection caused by one that reports the state of the other ranks.

    Raises:
        CollectiveError: naming the ranks and reasons; returns without raising if no rank is known to have failed.
    """
    if _active:
        _active[-1].explain(error)
    broken = broken_connection(error) if _troubles else None
    if broken is not None:
        said = "; ".join(_troubles.values())
        raise CollectiveError(f"{said}\n(the group said: {str(broken).splitlines()[0][:200]})") from error


def broken_connection(error: BaseException | None) -> RuntimeError | None:
    """Returns torch's error about a connection in the chain of causes of ``error``, or None."""
    seen: set[int] = set()  # because an error can be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and not isinstance(error, AccelError):
            return error if any(word in str(error).lower() for word in _OF_PEERS) else None
        error = error.__cause__
    return None


def has_timed_out(error: RuntimeError) -> bool:
    """Whether a collective failed because of its timeout, with all connections intact."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def recorded(
    operation: str, detail: Callable[..., str] | None = None, *, shared: bool = True, counted: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an operation that waits for other ranks: the watchdog records the operation and its source line.

    ``detail`` returns, from the arguments, a text that must be equal on all ranks. ``shared``: a collective of all
    ranks; otherwise each rank runs the operation independently and only waits inside; ``counted`` if all ranks run it
    equally often. Costs a tenth of a microsecond if no watchdog is active.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _active:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    explain(error)
                    raise
            watchdog = _active[-1]
            if threading.get_ident() != watchdog.main:
                return function(*args, **kwargs)
            together = shared and watchdog.concerns(kwargs.get("group"))
            text = detail(*args, **kwargs) if detail is not None else ""
            watchdog.enter(operation, text, shared=together, counted=counted)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if isinstance(error, TypeError | ValueError):
                    watchdog.record.withdraw()
                explain(error)
                raise
            finally:
                watchdog.record.leave()

        return wrapper

    return decorate


@final
class Recording:
    """Context manager that records its block like ``recorded``, without a frame between the caller and the block.

    One object may be entered many times, also inside itself and on other threads.
    """

    __slots__ = ("_counted", "_entered", "_operation", "_shared")

    def __init__(self, operation: str, *, shared: bool = True, counted: bool = False) -> None:
        self._operation = operation
        self._shared = shared
        self._counted = counted
        self._entered: list[Watchdog] = []
        """Watchdogs that were told of the block; only their main thread changes the list."""

    def __enter__(self) -> None:
        if _active and threading.get_ident() == (watchdog := _active[-1]).main:
            watchdog.enter(self._operation, shared=self._shared, counted=self._counted)
            self._entered.append(watchdog)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._entered:
            if isinstance(error, Exception) and not _active:
                explain(error)
            return
        watchdog = self._entered[-1]
        if threading.get_ident() != watchdog.main:
            return
        self._entered.pop()
        try:
            if isinstance(error, Exception):
                if isinstance(error, TypeError | ValueError):
                    watchdog.record.withdraw()
                explain(error)
        finally:
            watchdog.record.leave()


def outline(tree: Any) -> str:
    """Returns structure, dtypes and shapes of nested tensors as text, shortened to the size of a record entry."""
    return _shortened(_sketch(tree))


def _sketch(tree: Any) -> Any:
    """Returns the same outline as tuples, which are cheaper than text and serve as keys of the cache of texts."""
    kind = type(tree)
    if kind is dict:
        return "dict", tuple(tree), tuple([_sketch(value) for value in tree.values()])
    if kind is list or kind is tuple:
        return "list", tuple([_sketch(value) for value in tree])
    shape = getattr(tree, "shape", None)
    if shape is not None and hasattr(tree, "dtype"):
        return "tensor", tree.dtype, tuple(shape)
    if isinstance(tree, Mapping):
        return "dict", tuple(tree), tuple([_sketch(value) for value in tree.values()])
    if isinstance(tree, list | tuple):
        return "list", tuple([_sketch(value) for value in tree])
    if fields := getattr(kind, "__dataclass_fields__", None):
        return "dict", tuple(fields), tuple([_sketch(getattr(tree, name, None)) for name in fields])
    return "other", kind.__name__


@functools.lru_cache(maxsize=1024)
def _shortened(sketch: Any) -> str:
    text = _written(sketch)
    if len(text) <= 80:
        return text
    from zlib import crc32

    return f"{text[:68]}...{crc32(text.encode(errors='backslashreplace')):08x}"


def _written(sketch: Any) -> str:
    kind, *facts = sketch
    if kind == "dict":
        # Sorted by key, as collectives match leaves, because ranks may have filled their dicts in different orders.
        entries = sorted((str(key), _written(value)) for key, value in zip(*facts, strict=True))
        return "{" + ", ".join(f"{key}: {text}" for key, text in entries) + "}"
    if kind == "list":
        return "[" + ", ".join(map(_written, facts[0])) + "]"
    if kind == "tensor":
        return f"{str(facts[0]).removeprefix('torch.')}{list(facts[1])}"
    return str(facts[0])
