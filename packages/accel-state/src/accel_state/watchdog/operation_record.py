"""Record of this process's collectives, in shared memory that the other processes of the machine can read.

An entry is written before its operation begins, and the memory outlives the process, so the last operation of a killed,
stopped or aborted rank can still be reported. The memory is anonymous: it is freed with the last process that maps it.
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

from accel_state.watchdog.call_record import CALLS_SIZE, UNPRINTABLE, CallRecord

SLOTS, _TEXT = 32, 232
_HEADER = struct.Struct("<16sQQQQH")
"""Token, number of the newest entry, time of the last heartbeat, CPU time then, begin of a wait for the device
(0: none), length of the heartbeat's text."""
_ENTRY = struct.Struct("<QQQQQQH")
"""Number, sequence number (0: not a collective), begin and end (0: not yet) in ns of CLOCK_MONOTONIC, both numbers of
the progress, length of the text."""
_ENDED, _ENDED_AT = struct.Struct("<Q"), 24
_PROGRESS, _PROGRESS_AT = struct.Struct("<QQ"), 32
_SLOT = _ENTRY.size + _TEXT
_BEAT_TEXT = 2048
_SHARED = struct.Struct("<QQ")
"""Sequence number and digest of a collective of all ranks."""
_SHARED_SLOTS = 64
_SHARED_AT = _HEADER.size + _BEAT_TEXT
_SLOTS_AT = _SHARED_AT + _SHARED_SLOTS * _SHARED.size
CALLS_AT = _SLOTS_AT + SLOTS * _SLOT
SIZE = CALLS_AT + CALLS_SIZE
_SEPARATOR = "\x1f"


@final
@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One operation of one rank.

    ``sequence`` numbers the collectives of all ranks, from 1; 0 for operations that each rank runs independently, like
    backward. ``began`` and ``ended`` are seconds of the machine's monotonic clock; ``ended`` is None while the rank is
    inside. ``progress`` is comparable between ranks: the sequence number of the newest collective, and the number of
    counted operations (run independently, but equally often on all ranks) that the rank began after that collective.
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
        """The operation as a call expression."""
        return f"{self.operation}({self.detail})"


@final
@dataclass(frozen=True, slots=True)
class RecordSnapshot:
    """Contents of a record at one moment: its entries, oldest first, and the last heartbeat.

    ``on_device`` is the time since which the main thread has waited for a collective on the device; 0 if it does not.
    """

    entries: tuple[RecordedOperation, ...]
    beat: float
    processor: float
    said: str
    on_device: float = 0.0

    @property
    def current(self) -> RecordedOperation | None:
        """The outermost operation that the rank is inside, or None."""
        return next((entry for entry in self.entries if entry.ended is None), None)

    @property
    def last(self) -> RecordedOperation | None:
        """The operation that the rank began last, or None."""
        return self.entries[-1] if self.entries else None

    def at(self, sequence: int) -> RecordedOperation | None:
        """Returns the collective with this sequence number, or None if the record does not hold it."""
        return next((entry for entry in self.entries if entry.sequence == sequence), None)


@final
class Record:
    """Record of this process. Only the main thread writes operations; the watchdog's thread writes the heartbeat."""

    def __init__(self) -> None:
        self.token = os.urandom(16)
        self.descriptor = os.memfd_create("accel-watchdog") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
            self._memory = mmap.mmap(self.descriptor, SIZE)
        else:
            self._memory = mmap.mmap(-1, SIZE)
        self.calls = CallRecord(self._memory, CALLS_AT)
        self._number = 0
        self.sequence = 0
        self.trail = self._trail_before = 0
        self._counted = self._counted_before = 0
        self._open: list[int] = []
        self._together = 0
        self._main = threading.main_thread().ident
        self._texts: dict[tuple[int, int, str, str], tuple[bytes, int, CodeType | None]] = {}
        _HEADER.pack_into(self._memory, 0, self.token, 0, time.monotonic_ns(), 0, 0, 0)

    @property
    def progress(self) -> tuple[int, int]:
        """Progress of this rank, as in ``RecordedOperation.progress``."""
        return self.sequence, self._counted

    def enter(self, operation: str, detail: str, *, shared: bool, counted: bool = False) -> bool:
        """Records the beginning of an operation. Returns False, without recording, outside the main thread.

        ``shared``: a collective of all ranks; ``counted``: run independently, but equally often on all ranks.
        """
        if threading.get_ident() != self._main:
            return False
        memory, sequence = self._memory, 0
        number = self._number = self._number + 1
        if not self._together:  # otherwise it is part of a collective that has a number already
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
        if sequence:  # written last: a reader that sees it may read the entry
            _SHARED.pack_into(memory, _shared_offset(sequence), sequence, digest)
        self._open.append(number)
        return True

    def differs(self, peers: Iterable[mmap.mmap]) -> bool:
        """Whether a peer has recorded another operation under the newest sequence number of this rank."""
        offset = _shared_offset(self.sequence)
        mine = _SHARED.unpack_from(self._memory, offset)
        for peer in peers:
            other = _SHARED.unpack_from(peer, offset)
            if other[0] == mine[0] and other[1] != mine[1]:
                return True
        return False

    @property
    def inside(self) -> bool:
        """Whether an operation has begun and not ended."""
        return bool(self._open)

    def leave(self) -> None:
        """Records the end of the operation that began last."""
        number = self._open.pop()
        if number == self._together:
            self._together = 0
        if self._number - number < SLOTS:  # otherwise its slot has been reused
            offset = _SLOTS_AT + (number % SLOTS) * _SLOT
            _ENDED.pack_into(self._memory, offset + _ENDED_AT, time.monotonic_ns())

    def withdraw(self) -> None:
        """Uncounts the operation that began last, which was refused before any other rank was needed."""
        if self._together == self._number and self.sequence:
            _SHARED.pack_into(self._memory, _shared_offset(self.sequence), 0, 0)
            self.sequence -= 1
            self.trail = self._trail_before
            self._counted = self._counted_before
            offset = _SLOTS_AT + (self._number % SLOTS) * _SLOT
            _PROGRESS.pack_into(self._memory, offset + _PROGRESS_AT, self.sequence, self._counted)

    def beat(self, said: str, *, on_device: float = 0.0) -> None:
        """Writes a heartbeat: a text about what the process is doing, and the begin of a wait for the device."""
        data = said.encode(errors=UNPRINTABLE)[:_BEAT_TEXT]
        now, processor = time.monotonic_ns(), time.process_time_ns()
        self._memory[_HEADER.size : _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._memory, 0, self.token, self._number, now, processor, int(on_device * 1e9), len(data))

    def read(self) -> RecordSnapshot:
        """Returns the current contents."""
        return decode(self._memory[:])

    def image(self) -> bytes:
        """Returns the memory as bytes, for a process on another machine."""
        return bytes(self._memory[:])

    def close(self) -> None:
        """Closes the descriptor; other processes can still read the memory that they have mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _describe(self, key: tuple[int, int, str, str], frame: FrameType | None) -> tuple[bytes, int, CodeType | None]:
        """Returns text and digest of an operation, cached for the next call of the same operation from the same line.

        The cache entry includes the code object, which keeps its ``id`` from being reused; hashing the code would take
        longer.
        """
        operation, detail = key[2:]
        site = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        text = _SEPARATOR.join((operation[:32], detail[:88], site[-88:])).encode(errors=UNPRINTABLE)[:_TEXT]
        digest = crc32(f"{operation} {detail}".encode(errors=UNPRINTABLE))
        if len(self._texts) > 4096:
            self._texts.clear()
        described = self._texts[key] = text, digest, None if frame is None else frame.f_code
        return described


def _shared_offset(sequence: int) -> int:
    return _SHARED_AT + (sequence % _SHARED_SLOTS) * _SHARED.size


def decode(image: bytes) -> RecordSnapshot:
    """Decodes a record; entries that are being written at the moment are left out."""
    _, _, beat, processor, on_device, length = _HEADER.unpack_from(image, 0)
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
    return RecordSnapshot(tuple(entries), beat / 1e9, processor / 1e9, said, on_device / 1e9)


_OURS = frozenset(
    {
        *("accel", "accel_state", "accel_data", "accel_backends", "accel_ckpt", "accel_precision"),
        *("accel_deepspeed", "accel_launch", "accel_megatron", "accel_observe", "accel_planner", "torch"),
    }
)
_THEIRS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)


def _belongs_to_library(file: str, module: str) -> bool:
    return file.startswith("<") or module.partition(".")[0] in _OURS or any(part in file for part in _THEIRS)


# Cache by file name, because the lookup runs for every frame above every collective.
_library_files: dict[str, bool] = {}


def is_library(frame: FrameType) -> bool:
    """Whether the code of a frame belongs to Python, an installed package or accel, rather than to the program."""
    file = frame.f_code.co_filename
    found = _library_files.get(file)
    if found is None:
        found = _library_files[file] = _belongs_to_library(file, frame.f_globals.get("__name__", ""))
    return found


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of the program itself, or the outermost frame if there is none."""
    outermost = frame
    while frame is not None:
        if not is_library(frame):
            return frame
        outermost, frame = frame, frame.f_back
    return outermost


def describe_place(ident: int) -> str:
    """Describes the position of a thread: the line of the program, and the library function that it is inside."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "nowhere (it has ended)"
    own = _user_frame(frame)
    inside = "" if own is frame or own is None else f", inside {frame.f_code.co_name} of {_short(frame)}"
    return f"{_short(own or frame, whole=True)}{inside}"


def _short(frame: FrameType, *, whole: bool = False) -> str:
    file = frame.f_code.co_filename
    return f"{file if whole else os.path.basename(file)}:{frame.f_lineno}"
