"""Machines of a hostfile, in the format of DeepSpeed and Open MPI (``name slots=4``) or of MPICH (``name:4``)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from accel_launch.config.setting import nearest
from accel_state.errors import LaunchError

_LINE = re.compile(r"(?P<name>[^\s:=]+)(?::(?P<count>\d+))?(?P<rest>(?:\s+\S+)*)")


@final
@dataclass(frozen=True, slots=True)
class Machine:
    """One machine with ``num_processes`` processes, on the accelerators ``gpu_ids`` if they are given."""

    name: str
    num_processes: int | None = None
    gpu_ids: tuple[int, ...] | None = None


def read_hostfile(path: str) -> tuple[Machine, ...]:
    """Reads the machines of a file.

    Raises:
        LaunchError: the file is missing or empty, or a line is invalid (named by its number).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LaunchError(f"cannot read the hostfile {path!r}: {reason}") from error
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str = "hostfile") -> tuple[Machine, ...]:
    """Parses the machines of ``text``, one a line; ``#`` starts a comment.

    Raises:
        LaunchError: an invalid line, a machine given twice, or no machine at all.
    """
    machines: dict[str, Machine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise LaunchError(f"{path}:{number}: cannot read {line!r}; expected a line like 'worker-1 slots=8'")
        name = match["name"]
        if name in machines:
            raise LaunchError(f"{path}:{number}: {name} is listed twice; give it once, with all its slots")
        count = match["count"]
        for word in match["rest"].split():
            key, _, value = word.partition("=")
            if key not in ("slots", "max_slots", "max-slots") or not value.isdecimal():
                raise LaunchError(f"{path}:{number}: cannot read {word!r}; expected slots=N")
            count = value if key == "slots" else count
        if count is not None and int(count) < 1:
            raise LaunchError(f"{path}:{number}: {name} has {count} slots; expected 1 or more, or leave the line out")
        machines[name] = Machine(name, None if count is None else int(count))
    if not machines:
        raise LaunchError(f"{path} lists no machine; expected lines like 'worker-1 slots=8'")
    return tuple(machines.values())


def filtered(machines: Sequence[Machine], include: str | None, exclude: str | None) -> tuple[Machine, ...]:
    """Applies DeepSpeed's filters to machines and slots: ``host1@host2:0,2`` names machines, or slots of one.

    Raises:
        LaunchError: both filters are given, a machine or slot is unknown, or none is left.
    """
    if include and exclude:
        raise LaunchError(f"the inclusion filter {include!r} and the exclusion filter {exclude!r} exclude each other")
    if include is None and exclude is None:
        return tuple(machines)
    named = _parse_filter(include or exclude or "", machines)
    left = []
    for machine in machines:
        every = tuple(range(machine.num_processes or 0))
        slots = named.get(machine.name)
        if include:
            keep = None if machine.name not in named else slots or every
        else:
            keep = every if machine.name not in named else tuple(s for s in every if s not in (slots or every))
        if keep is None or (not keep and machine.name in named and exclude):
            continue
        left.append(machine if keep == every else replace(machine, num_processes=len(keep), gpu_ids=keep))
    if not left:
        raise LaunchError(
            f"the filter {include or exclude!r} leaves no machine of {', '.join(m.name for m in machines)}"
        )
    return tuple(left)


def _parse_filter(text: str, machines: Sequence[Machine]) -> Mapping[str, tuple[int, ...]]:
    known = {machine.name: machine for machine in machines}
    named: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, _, slots = part.partition(":")
        if name not in known:
            close = nearest(name, known)
            raise LaunchError(f"the filter {text!r} names {name!r}; {_hint(close, list(known))}")
        count = known[name].num_processes or 0
        chosen = tuple(int(slot) for slot in slots.split(",") if slot.strip().isdecimal())
        strange = [slot for slot in chosen if slot >= count]
        if strange or len(chosen) != len([slot for slot in slots.split(",") if slot]):
            raise LaunchError(f"the filter {text!r} wants slots {slots!r} of {name}, which has {count}, from 0")
        named[name] = chosen
    return named


def _hint(close: str | None, known: Sequence[str]) -> str:
    return f"did you mean {close}?" if close else f"the hostfile has: {', '.join(known)}"
