"""Serialization of a function call for other processes, and of their results.

Functions and classes of a cell are pickled by value; importable ones by name. The files are in a temporary folder of
one call, between processes that this one started; they are never kept.
"""

import json
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from accel_launch.notebook.pickle_by_value import dumps, loads, require_cloudpickle
from accel_state.errors import LaunchError

_PATHS, _SOURCES, _CALL = "paths.json", "sources.json", "call.pkl"


def pack_call(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Serializes a call into ``folder``.

    Raises:
        LaunchError: cloudpickle is not installed, or the function refers to an object that cannot be pickled.
    """
    cloudpickle = require_cloudpickle()
    # the import system, too, passes over entries that are no text, such as a Path
    (folder / _PATHS).write_text(json.dumps([entry for entry in sys.path if isinstance(entry, str)]))
    with _whole(cloudpickle, function):
        try:
            data = dumps((function, tuple(args)))
        except Exception as error:
            name = getattr(function, "__name__", repr(function))
            where, cause = _unsendable(function, args) or ("", error)
            raise LaunchError(
                f"{name} cannot be sent to other processes{where}: {type(cause).__name__}: {cause}. It, its arguments "
                "and the global names it uses must be picklable: open files, sockets, an Accelerator or a model on a "
                f"device belong inside {name}, where each process makes its own"
            ) from error
    (folder / _SOURCES).write_text(json.dumps(_cell_sources()))
    (folder / _CALL).write_bytes(data)


def unpack_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Deserializes the call, in a process that was started for it; adds the sender's import paths."""
    paths = json.loads((folder / _PATHS).read_text())
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    for name, lines in json.loads((folder / _SOURCES).read_text()).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    call: tuple[Callable[..., Any], tuple[Any, ...]] = loads((folder / _CALL).read_bytes())
    return call


def pack_result(folder: Path, rank: int, result: Any) -> None:
    """Serializes a rank's result into ``folder``, with tensors on the CPU.

    Raises:
        LaunchError: the result cannot be pickled.
    """
    from accel_state.pytree.operations import send_to_device

    try:
        data = dumps(send_to_device(result, "cpu"))
    except Exception as error:
        raise LaunchError(
            f"rank {rank} returned a {type(result).__qualname__}, which cannot be sent back: "
            f"{type(error).__name__}: {error}"
        ) from error
    staged = folder / f"result_{rank}.part"
    staged.write_bytes(data)
    staged.replace(folder / f"result_{rank}.pkl")


def unpack_results(folder: Path, ranks: Sequence[int]) -> list[Any]:
    """Results of these ranks, in order."""
    return [loads((folder / f"result_{rank}.pkl").read_bytes()) for rank in ranks]


def _unsendable(function: object, args: Sequence[Any] = ()) -> tuple[str, Exception] | None:
    """First variable of a call, or of a function that it uses, that cannot be pickled, with the error."""
    held = {f"argument {position}": value for position, value in enumerate(args)}
    seen: set[int] = set()
    waiting = [("", name, value) for name, value in {**held, **_variables(function)}.items()]
    while waiting:
        user, name, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            dumps(value)
        except Exception as error:
            inner = [(name, used, item) for used, item in _variables(value).items()]
            if not inner:
                return f", because of {name}{f', which {user} uses' if user else ''} ({type(value).__name__})", error
            waiting[:0] = inner
    return None


def _variables(function: object) -> Mapping[str, Any]:
    """Variables that a function uses, by name: globals, variables of enclosing functions, defaults."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # skips empty cells
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    defaults = {
        **dict(zip(positional[len(positional) - len(given) :], given, strict=True)),
        **(function.__kwdefaults__ or {}),
    }
    return used | around | {f"the default of {name}": value for name, value in defaults.items()}


def _names(code: CodeType) -> list[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _cell_sources() -> dict[str, list[str]]:
    """Source lines that are in no file, such as those of cells, for tracebacks in other processes."""
    entries = ((name, entry) for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None)
    return {name: list(entry[2]) for name, entry in entries}


@contextmanager
def _whole(cloudpickle: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, the function's module is pickled by value if other processes could not import it by name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    if module.__name__ in sys.builtin_module_names:
        return True
    try:
        found = sys.modules[module.__name__.partition(".")[0]].__spec__ if "." in module.__name__ else None
        spec = find_spec(module.__name__) if found is None else found
    except (ImportError, ValueError, KeyError):
        return False
    if spec is None or not spec.origin:
        return spec is not None and bool(spec.submodule_search_locations)
    # A module that pytest or runpy loaded has a spec under its name, but other processes cannot import it by that name.
    return _found_on_path(module.__name__)


def _found_on_path(name: str) -> bool:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(name.partition(".")[0], sys.path) is not None
