"""Calls that some ranks make together, of one kind: each rank records its own where the others can read it.

A call of a model with gradients on some ranks and without on others has no collective in which they could find out: the
ranks wait in different ones. A rank compares kinds as it begins a call, and its watchdog while it waits in one. That
costs no communication between ranks of one machine.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

if TYPE_CHECKING:
    from mmap import mmap

_SLOTS, _TEXT = 16, 230
_CALL: Final = struct.Struct("<QIH")
"""Key of the call (0: none), whether it failed, length of the text."""
_SLOT = _CALL.size + _TEXT
FREED: Final = "left the call because "
"""Begin of the failure of a rank whose watchdog ended its wait."""
CALLS_SIZE: Final = _SLOTS * _SLOT
"""Bytes of the calls of one rank."""
UNPRINTABLE: Final = "backslashreplace"
"""What becomes of characters that UTF-8 does not have, as of file names of other encodings (PEP 383)."""


@final
@dataclass(frozen=True, slots=True)
class CommonCall:
    """One call: its key, equal on all of ``ranks``, and its kind, which has to be.

    ``needed``: ranks whose failure this rank learns from their records only, because it waits for them within the call.
    ``failure`` is why the rank cannot finish the call; empty: it can.
    """

    key: int
    ranks: tuple[int, ...]
    kind: str
    needed: tuple[int, ...] = ()
    failure: str = ""


@final
class CallRecord:
    """Calls of this process in ``memory``, from ``offset`` on. Only the main thread writes."""

    def __init__(self, memory: "mmap", offset: int) -> None:
        self._memory, self._offset = memory, offset
        self._numbers: dict[tuple[int, ...], int] = {}
        self.current: CommonCall | None = None

    def begin(self, ranks: Sequence[int], kind: str, needed: Sequence[int] = ()) -> CommonCall:
        """Records that this rank begins a call that all of ``ranks`` make, which is the next one of these ranks."""
        together = tuple(ranks)
        number = self._numbers[together] = self._numbers.get(together, 0) + 1
        key = crc32(repr(together).encode()) << 32 | number & 0xFFFFFFFF
        call = self.current = CommonCall(key, together, kind, tuple(needed))
        self._write(call)
        return call

    def fail(self, why: str) -> None:
        """Records that this rank cannot finish its call, for which others may wait; the first reason stays."""
        if self.current is not None and not self.current.failure:
            self.current = replace(self.current, failure=why)
            self._write(self.current)

    def end(self) -> None:
        """Records that this rank is in no call."""
        self.current = None

    def _write(self, call: CommonCall) -> None:
        at = self._offset + call.key % _SLOTS * _SLOT
        text = (call.failure or call.kind).encode(errors=UNPRINTABLE)[:_TEXT]
        _CALL.pack_into(self._memory, at, 0, 0, 0)  # a reader that sees the key may read the text
        self._memory[at + _CALL.size : at + _CALL.size + len(text)] = text
        _CALL.pack_into(self._memory, at, call.key, bool(call.failure), len(text))


def read_call(memory: "mmap | bytes", offset: int, call: CommonCall) -> CommonCall | None:
    """Returns what another rank has recorded of a call; None if it has not begun, or is forgotten."""
    at = offset + call.key % _SLOTS * _SLOT
    key, failed, length = _CALL.unpack_from(memory, at)
    text = bytes(memory[at + _CALL.size : at + _CALL.size + length]).decode(errors="replace")
    if key != call.key or _CALL.unpack_from(memory, at)[0] != key:
        return None
    return CommonCall(key, call.ranks, call.kind if failed else text, failure=text if failed else "")


def problem(mine: CommonCall, own: int, others: Mapping[int, CommonCall], *, waits: bool) -> str | None:
    """Why a call cannot end: another kind on other ranks, or where this one ``waits``, a needed rank that failed.

    The latter ends the wait of all ranks of the call, once one of them has ended its own.
    """
    needed = {rank: call for rank, call in others.items() if rank in mine.needed and not mine.failure}
    ended = any(call.failure.startswith(FREED) for call in others.values())
    return difference(mine, own, others) or (failures(others if ended else needed) if waits else None)


def difference(mine: CommonCall, own: int, others: Mapping[int, CommonCall]) -> str | None:
    """Text about the ranks that make another kind of call; None if all that have begun make the same."""
    kinds: dict[str, list[int]] = {}
    for rank, call in sorted({**others, own: mine}.items()):
        kinds.setdefault(call.kind, []).append(rank)
    if len(kinds) < 2:
        return None
    told = ", and ".join(f"{kind} on ranks {', '.join(map(str, ranks))}" for kind, ranks in kinds.items())
    return f"{told}: ranks {', '.join(map(str, mine.ranks))} make this call together; nearest: the same on all of them"


def failures(others: Mapping[int, CommonCall]) -> str | None:
    """Text about the ranks that cannot finish the call; None if there are none."""
    failed = {rank: call for rank, call in sorted(others.items()) if call.failure}
    causes = {rank: call for rank, call in failed.items() if not call.failure.startswith(FREED)}
    return "; ".join(f"rank {rank} {call.failure}" for rank, call in (causes or failed).items()) or None
