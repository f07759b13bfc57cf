"""Parsing and temporary changes of environment variables.

Only this module reads or writes ``os.environ`` itself; the rest of accel receives a mapping.
"""

import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, final

_LOG = logging.getLogger(__name__)
_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
T = TypeVar("T")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on, 1; 0 for n, no, f, false, off, 0, in any case (True and False with ``to_bool``).

    Raises:
        ValueError: anything else.
    """
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"invalid truth value {value!r}; expected one of yes, true, on, 1, no, false, off, 0")
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Returns the first of the variables that holds a number >= 0; otherwise ``default``.

    Raises:
        ValueError: a variable does not hold an integer.
    """
    values = (int(os.environ.get(key, "-1")) for key in env_keys)
    return next((value for value in values if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Returns the variable as a bool; ``default`` if it is unset.

    Raises:
        ValueError: the variable does not hold a truth value.
    """
    value = os.environ.get(key)
    return default if value is None else bool(str_to_bool(value))


def parse_flag(env: Mapping[str, str], key: str) -> bool:
    """Returns a variable of ``env`` as a bool; False if it is unset or empty.

    Raises:
        ValueError: the variable does not hold a truth value.
    """
    value = env.get(key)
    return bool(value) and bool(str_to_bool(value or ""))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Returns the variable's text; ``default`` if it is unset."""
    return os.environ.get(key, default)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empties the environment inside the block, and restores all of it afterwards."""
    with _restored():
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Sets the variables (names in upper case, ``str`` of the values) inside the block, then restores them."""
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _restored(prefix: str = "") -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefix) and name not in before]:
            del os.environ[name]
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorates a function, or every ``test*`` method of a class, to restore all ``ACCELERATE_*`` variables afterwards.

    Also applies to the ``test*`` methods that subclasses of a decorated class add.
    """
    purged: T = _purged_class(func_or_cls) if inspect.isclass(func_or_cls) else _purged_function(func_or_cls)
    return purged


def _purged_function(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with _restored("ACCELERATE_"):
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _restored("ACCELERATE_"):
            return function(*args, **kwargs)

    return called


def _purged_class(cls: Any) -> Any:
    def wrap_tests(owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if name.startswith("test") and inspect.isfunction(value):
                setattr(owner, name, _purged_function(value))

    wrap_tests(cls)
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: Any, /, **kwargs: Any) -> None:
        if own is None:
            super(cls, subclass).__init_subclass__(**kwargs)
        else:
            own.__get__(None, subclass)(**kwargs)
        wrap_tests(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)
    return cls


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Formats ``KEY=value`` lines, each ending in a newline; drops entries that a shell would misread and warns."""
    lines = []
    for name, value in current_env.items():
        if name and value and not any(char in ";\n<> " for char in name + value):
            lines.append(f"{name}={value}\n")
        else:
            _LOG.warning("left out %s=%r: empty, or with a space, newline, ';', '<' or '>'", name, value)
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Returns the names of the libraries that are already imported."""
    return [name for name in library_names if name in sys.modules]


@final
@dataclass(frozen=True, slots=True)
class CPUInformation:
    """Rank and world size of this process, globally and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Returns the fields of ``Topology.from_env(os.environ)`` in Accelerate's form.

    Raises:
        TopologyError: a launcher's variables contradict each other.
    """
    from accel_state.topology import Topology

    here = Topology.from_env(os.environ)
    return CPUInformation(here.rank, here.world_size, here.local_rank, here.local_world_size)


def usable_cpus() -> list[int]:
    """Returns the numbers of the CPUs that this process may use: its affinity, or all where there is no affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))


def available_cpus(root: Path = Path("/")) -> int:
    """Returns the number of CPUs whose time this process may use.

    That is the number of ``usable_cpus``, or less if a control group has a quota, rounded up (a limit of Kubernetes,
    ``docker --cpus``). ``root``: where ``proc`` and ``sys`` are.

    Source: ``cpu.max`` in the kernel's cgroup-v2.rst; ``cpu.cfs_quota_us`` in its sched-bwc.rst.
    """
    quotas = [quota for folder in _cpu_groups(root) if (quota := _cpu_quota(folder)) is not None]
    return max(1, math.ceil(min([len(usable_cpus()), *quotas])))


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Yields folders of the control groups of this process and of those around them, which may not exist."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):  # version 2, or the controller of version 1
            for group in (own := PurePosixPath(path), *own.parents):
                for mount in (mounts, mounts / (controllers or "unified"), mounts / "cpu"):
                    yield mount / group.relative_to("/")


def _cpu_quota(folder: Path) -> float | None:
    """CPUs that a control group grants; None if it sets no limit."""
    with suppress(OSError, ValueError):  # "max" is no limit
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def get_current_device_type() -> tuple[str, str]:
    """Returns the accelerator type and its ``DistributedType`` name; ("cuda", "MULTI_GPU") without an accelerator."""
    from accel_state.device.kinds import DEVICE_KINDS

    for kind in DEVICE_KINDS.values():
        if kind.functions.indexed and kind.functions.is_present(kind, os.environ):
            return kind.type, kind.family
    return "cuda", "MULTI_GPU"
