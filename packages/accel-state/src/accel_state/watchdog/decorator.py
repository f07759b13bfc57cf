"""The doctors of this process, and the decorator that records an operation with them."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel_state.errors import AccelError, CollectiveError

if TYPE_CHECKING:
    from accel_state.watchdog.monitor import Doctor

P = ParamSpec("P")
R = TypeVar("R")

# torch has one default group per process, so its doctor belongs to the process too.
_active: "list[Doctor]" = []
# What keeps ranks of that group from its operations, as far as they could still report it.
_troubles: dict[int, str] = {}
_OF_PEERS = ("connection", "broken pipe", "store", "peer", "gloo", "nccl", "timed out", "timeout", "socket", "rank")


def active() -> "Doctor | None":
    """The doctor of this process, if it has one."""
    return _active[-1] if _active else None


def add(doctor: "Doctor") -> None:
    """Makes ``doctor`` the active one."""
    _active.append(doctor)


def remove(doctor: "Doctor") -> None:
    """Makes it inactive."""
    _active[:] = [other for other in _active if other is not doctor]


def troubled(rank: int, text: str) -> None:
    """Notes what keeps another rank from continuing: operations that wait for it name that when they fail."""
    _troubles[rank] = text


def untroubled() -> None:
    """Forgets all notes of ``troubled``: the ranks continue."""
    _troubles.clear()


def troubles() -> Mapping[int, str]:
    """What keeps ranks from continuing, by rank."""
    return _troubles


def explain(error: Exception) -> None:
    """Raises what is known of the other ranks in the place of an error that a broken connection caused.

    Raises:
        CollectiveError: naming the ranks and why; nothing is raised if nothing is known of them.
    """
    if _active:
        _active[-1].explain(error)
    broken = broken_connection(error) if _troubles else None
    if broken is not None:
        said = "; ".join(_troubles.values())
        raise CollectiveError(f"{said}\n(the group said: {str(broken).splitlines()[0][:200]})") from error


def broken_connection(error: BaseException | None) -> RuntimeError | None:
    """Torch's error about a connection, if it caused ``error``."""
    seen: set[int] = set()  # as an error can be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and not isinstance(error, AccelError):
            return error if any(word in str(error).lower() for word in _OF_PEERS) else None
        error = error.__cause__
    return None


def has_timed_out(error: RuntimeError) -> bool:
    """Whether a collective failed because its time was over, with all connections intact."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def recorded(
    operation: str, detail: Callable[..., str] | None = None, *, shared: bool = True, counted: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an operation that waits for other ranks, so that the doctor knows who is in it, and from which line.

    ``detail`` makes of the arguments what must be the same on all ranks. ``shared``: all ranks do it together;
    otherwise each does it by itself and only waits inside, ``counted`` if all do it equally often. Costs a tenth of a
    microsecond where no doctor is active.
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
            doctor = _active[-1]
            if threading.get_ident() != doctor.main:
                return function(*args, **kwargs)
            together = shared and doctor.concerns(kwargs.get("group"))
            text = detail(*args, **kwargs) if detail is not None else ""
            doctor.enter(operation, text, shared=together, counted=counted)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if isinstance(error, TypeError | ValueError):
                    doctor.record.withdraw()
                explain(error)
                raise
            finally:
                doctor.record.leave()

        return wrapper

    return decorate


def outline(tree: Any) -> str:
    """Structure, dtypes and shapes of nested tensors, shortened to what a record holds."""
    return _shortened(_sketch(tree))


def _sketch(tree: Any) -> Any:
    """The same as tuples, which cost less to make than text; texts of those that were seen before are kept."""
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

    return f"{text[:68]}...{crc32(text.encode()):08x}"


def _written(sketch: Any) -> str:
    kind, *facts = sketch
    if kind == "dict":
        # By key, as collectives match them: ranks may have filled their dicts in another order.
        entries = sorted((str(key), _written(value)) for key, value in zip(*facts, strict=True))
        return "{" + ", ".join(f"{key}: {text}" for key, text in entries) + "}"
    if kind == "list":
        return "[" + ", ".join(map(_written, facts[0])) + "]"
    if kind == "tensor":
        return f"{str(facts[0]).removeprefix('torch.')}{list(facts[1])}"
    return str(facts[0])
