"""A numbered record of this process's collectives, in memory that the other processes of the machine can read.

It is written before an operation begins and outlives the process, so what a killed, stopped or aborted rank was about
to do can still be said. The memory belongs to no file: it is gone with the last process that maps it.
"""

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import final
from zlib import crc32

SLOTS, _TEXT = 32, 232
_HEADER = struct.Struct("<16sQQQH")
"""Token, number of the newest entry, time of the last beat, processor time then, length of the beat's text."""
_ENTRY = struct.Struct("<QQQQQQH")
"""Number, common number (0: none), when it began and ended (0: not yet) in ns of CLOCK_MONOTONIC, both numbers of its
progress, length of text."""
_ENDED, _ENDED_AT = struct.Struct("<Q"), 24
_PROGRESS, _PROGRESS_AT = struct.Struct("<QQ"), 32
_SLOT = _ENTRY.size + _TEXT
_BEAT_TEXT = 2048
_SHARED = struct.Struct("<QQ")
"""Sequence number and digest of an operation that all ranks do together."""
_SHARED_SLOTS = 64
_SHARED_AT = _HEADER.size + _BEAT_TEXT
_SLOTS_AT = _SHARED_AT + _SHARED_SLOTS * _SHARED.size
SIZE = _SLOTS_AT + SLOTS * _SLOT
_SEPARATOR = "\x1f"


@final
@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One operation of one rank.

    ``sequence`` numbers the operations that all ranks do together, from 1; 0 for those that each does by itself, like
    backward. ``began`` and ``ended`` are seconds of the machine's monotonic clock; ``ended`` None: still inside.
    ``progress`` is how far the rank had come with it, to be compared between ranks: the number of the newest common
    operation, and how many counted ones (which each rank does by itself, and all equally often) it began after that.
    """

    number: int
    sequence: int
    operation: str
    detail: str
    site: str
    began: float
    ended: float | None
    progress: tuple[int, int] = (0, 0)

    @property
    def what(self) -> str:
        """The operation as one would write it."""
        return f"{self.operation}({self.detail})"


@final
@dataclass(frozen=True, slots=True)
class RecordSnapshot:
    """What a record said at one moment: its entries, oldest first, and the last sign of life."""

    entries: tuple[RecordedOperation, ...]
    beat: float
    processor: float
    said: str

    @property
    def current(self) -> RecordedOperation | None:
        """The outermost operation that the rank is inside of."""
        return next((entry for entry in self.entries if entry.ended is None), None)

    @property
    def last(self) -> RecordedOperation | None:
        """The operation that it began last."""
        return self.entries[-1] if self.entries else None

    def at(self, sequence: int) -> RecordedOperation | None:
        """The operation with this number among those that all ranks do together, if it is known."""
        return next((entry for entry in self.entries if entry.sequence == sequence), None)


@final
class Record:
    """The record of this process. Only the main thread writes operations; the doctor's thread writes the beat."""

    def __init__(self) -> None:
        self.token = os.urandom(16)
        self.descriptor = os.memfd_create("accel-doctor") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
            self._memory = mmap.mmap(self.descriptor, SIZE)
        else:
            self._memory = mmap.mmap(-1, SIZE)
        self._number = 0
        self.sequence = 0
        self.trail = self._trail_before = 0
        self._counted = self._counted_before = 0
        self._open: list[int] = []
        self._together = 0
        self._main = threading.main_thread().ident
        self._texts: dict[tuple[int, int, str, str], tuple[bytes, int, CodeType | None]] = {}
        _HEADER.pack_into(self._memory, 0, self.token, 0, time.monotonic_ns(), 0, 0)

    @property
    def progress(self) -> tuple[int, int]:
        """How far this rank has come, as ``RecordedOperation.progress``."""
        return self.sequence, self._counted

    def enter(self, operation: str, detail: str, *, shared: bool, counted: bool = False) -> bool:
        """Notes that an operation begins. False: not to be noted here.

        ``shared``: all ranks do it together; ``counted``: each does it by itself, and all equally often.
        """
        if threading.get_ident() != self._main:
            return False
        memory, sequence = self._memory, 0
        number = self._number = self._number + 1
        if not self._together:  # otherwise it is a part of an operation that is numbered already
            if shared:
                sequence = self.sequence = self.sequence + 1
                self._together = number
                self._counted_before, self._counted = self._counted, 0
            elif counted:
                self._counted += 1
        frame = _user_frame(sys._getframe(1))
        key = (0, -1, operation, detail) if frame is None else (id(frame.f_code), frame.f_lasti, operation, detail)
        text, digest, _ = self._texts.get(key) or self._describe(key, frame)
        if sequence:
            self._trail_before, self.trail = self.trail, crc32(digest.to_bytes(4, "little"), self.trail)
        offset = _SLOTS_AT + (number % SLOTS) * _SLOT
        begin = offset + _ENTRY.size
        memory[begin : begin + len(text)] = text
        now, reached, steps = time.monotonic_ns(), self.sequence, self._counted
        _ENTRY.pack_into(memory, offset, number, sequence, now, 0, reached, steps, len(text))
        if sequence:  # last: who sees it may read the entry
            _SHARED.pack_into(memory, _shared_offset(sequence), sequence, digest)
        self._open.append(number)
        return True

    def differs(self, peers: Iterable[mmap.mmap]) -> bool:
        """Whether a peer's operation with the newest sequence number is another one than ours, if it has come there."""
        offset = _shared_offset(self.sequence)
        mine = _SHARED.unpack_from(self._memory, offset)
        for peer in peers:
            other = _SHARED.unpack_from(peer, offset)
            if other[0] == mine[0] and other[1] != mine[1]:
                return True
        return False

    @property
    def inside(self) -> bool:
        """Some operation has begun and not ended."""
        return bool(self._open)

    def leave(self) -> None:
        """Notes that the operation begun last has ended."""
        number = self._open.pop()
        if number == self._together:
            self._together = 0
        if self._number - number < SLOTS:  # else its place is another's by now
            offset = _SLOTS_AT + (number % SLOTS) * _SLOT
            _ENDED.pack_into(self._memory, offset + _ENDED_AT, time.monotonic_ns())

    def withdraw(self) -> None:
        """The operation begun last was refused before any other rank was needed: it counts for nothing."""
        if self._together == self._number and self.sequence:
            _SHARED.pack_into(self._memory, _shared_offset(self.sequence), 0, 0)
            self.sequence -= 1
            self.trail = self._trail_before
            self._counted = self._counted_before
            offset = _SLOTS_AT + (self._number % SLOTS) * _SLOT
            _PROGRESS.pack_into(self._memory, offset + _PROGRESS_AT, self.sequence, self._counted)

    def beat(self, said: str) -> None:
        """A sign of life, with what the process is doing."""
        data = said.encode()[:_BEAT_TEXT]
        now, processor = time.monotonic_ns(), time.process_time_ns()
        self._memory[_HEADER.size : _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._memory, 0, self.token, self._number, now, processor, len(data))

    def read(self) -> RecordSnapshot:
        """What it says now."""
        return decode(self._memory[:])

    def image(self) -> bytes:
        """All of it, for a process on another machine."""
        return bytes(self._memory[:])

    def close(self) -> None:
        """Closes the descriptor; other processes can still read the memory that they have mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _describe(self, key: tuple[int, int, str, str], frame: FrameType | None) -> tuple[bytes, int, CodeType | None]:
        """The text and the digest of an operation, kept for the next time that this line does the same.

        With the code, which lives as long, so that no other has its ``id``: hashing code itself takes longer.
        """
        operation, detail = key[2:]
        site = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        text = _SEPARATOR.join((operation[:32], detail[:88], site[-88:])).encode()[:_TEXT]
        digest = crc32(f"{operation} {detail}".encode())
        if len(self._texts) > 4096:
            self._texts.clear()
        described = self._texts[key] = text, digest, None if frame is None else frame.f_code
        return described


def _shared_offset(sequence: int) -> int:
    return _SHARED_AT + (sequence % _SHARED_SLOTS) * _SHARED.size


def decode(image: bytes) -> RecordSnapshot:
    """Reads a record; entries that are being written meanwhile are left out."""
    _, _, beat, processor, length = _HEADER.unpack_from(image, 0)
    said = image[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    entries = []
    for slot in range(SLOTS):
        offset = _SLOTS_AT + slot * _SLOT
        number, sequence, began, ended, reached, steps, size = _ENTRY.unpack_from(image, offset)
        parts = image[offset + _ENTRY.size : offset + _ENTRY.size + size].decode(errors="replace").split(_SEPARATOR)
        if number and len(parts) == 3:
            times = began / 1e9, ended / 1e9 if ended else None
            entries.append(RecordedOperation(number, sequence, parts[0], parts[1], parts[2], *times, (reached, steps)))
    entries.sort(key=lambda entry: entry.number)
    return RecordSnapshot(tuple(entries), beat / 1e9, processor / 1e9, said)


_OURS = frozenset(
    {
        *("accel", "accel_state", "accel_data", "accel_backends", "accel_ckpt", "accel_precision"),
        *("accel_deepspeed", "accel_launch", "accel_observe", "accel_planner", "torch"),
    }
)
_THEIRS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)


def _belongs_to_library(file: str, module: str) -> bool:
    return file.startswith("<") or module.partition(".")[0] in _OURS or any(part in file for part in _THEIRS)


# Of files whose code has run: looked up for every frame above every collective.
_library_files: dict[str, bool] = {}


def is_library(frame: FrameType) -> bool:
    """Whether code is Python's, an installed package's or ours, rather than the program's own."""
    file = frame.f_code.co_filename
    found = _library_files.get(file)
    if found is None:
        found = _library_files[file] = _belongs_to_library(file, frame.f_globals.get("__name__", ""))
    return found


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the program itself, or the outermost of all."""
    outermost = frame
    while frame is not None:
        if not is_library(frame):
            return frame
        outermost, frame = frame, frame.f_back
    return outermost


def describe_place(ident: int) -> str:
    """Where a thread stands: the program's own line, and what that is inside of."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "nowhere (it has ended)"
    own = _user_frame(frame)
    inside = "" if own is frame or own is None else f", inside {frame.f_code.co_name} of {_short(frame)}"
    return f"{_short(own or frame, whole=True)}{inside}"


def _short(frame: FrameType, *, whole: bool = False) -> str:
    file = frame.f_code.co_filename
    return f"{file if whole else os.path.basename(file)}:{frame.f_lineno}"
