"""Files in blocks, each with its own digest: written, digested and checked by several threads at once.

Blocks instead of one digest per file, so that several threads can work on one file and a reader that needs a part can
check just that part. Both digests are in the standard library and let go of the interpreter lock. CRC-32 is the default
because it finds damage as well as any in blocks of this size and runs at 4 GB/s and thread; SHA-256 ran at 1.7 GB/s
here, and at a third of that on processors without instructions for it, which is slower than their disks. SHA-256 is for
who signs the manifest's seal and wants the signature to cover the tensors (blake2b ran at 0.8 GB/s, md5 at 0.7).
"""

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from accel_state.errors import CheckpointCorruptError, CheckpointError

BLOCK = 8 * 2**20
_IOV_MAX = 1024
# Blocks written but not yet digested; where they are copies (of a device's memory), this bounds them.
_IN_FLIGHT = 32
_SYNC_FILE_RANGE_WRITE = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of each of its blocks, in hexadecimal."""

    size: int
    blocks: tuple[str, ...]


def sha256(views: Iterable[memoryview | bytes]) -> str:
    """SHA-256, 64 hexadecimal digits."""
    sha = hashlib.sha256()
    for view in views:
        sha.update(view)
    return sha.hexdigest()


def crc32(views: Iterable[memoryview | bytes]) -> str:
    """CRC-32 as in zlib, gzip and Ethernet, 8 hexadecimal digits."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return f"{value:08x}"


Digest = Literal["crc32", "sha256"]
DIGESTS: dict[str, Callable[[Iterable[memoryview | bytes]], str]] = {"crc32": crc32, "sha256": sha256}


def default_threads() -> int:
    """Enough to keep a disk busy, no more than there are processors to run on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, usable))


def in_blocks(pieces: Iterable[memoryview], block: int = BLOCK) -> Iterator[list[memoryview]]:
    """``pieces`` cut and grouped so that every group but the last has ``block`` bytes."""
    group: list[memoryview] = []
    room = block
    for piece in pieces:
        while len(piece):
            head, piece = piece[:room], piece[room:]
            group.append(head)
            room -= len(head)
            if not room:
                yield group
                group, room = [], block
    if group:
        yield group


def write_file(
    path: Path, pieces: Iterable[memoryview], *, threads: int | None = None, digest: Digest = "crc32"
) -> FileRecord:
    """Writes ``pieces`` one after the other into the new file ``path`` and waits until they are on the disk.

    This thread writes; ``threads`` others digest what it has written (0: this one does both). The system is told to
    start each block on its way at once, so that the disk and the digests do not wait for each other.

    Raises:
        CheckpointError: the disk is full (says what was needed and what is free), or refused.
    """
    count = default_threads() if threads is None else threads
    written = 0
    digests: list[str] = []
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            with _Digester(count, DIGESTS[digest]) as digester:
                for views in in_blocks(pieces):
                    length = sum(map(len, views))
                    _write_all(handle, views, written)
                    _start_writeback(handle, written, length)
                    digester.add(views)
                    written += length
                os.fsync(handle)
                digests = digester.digests()
        finally:
            os.close(handle)
    except OSError as error:
        raise _explain(error, path, written) from error
    return FileRecord(written, tuple(digests))


@final
class CheckedFile:
    """A file of a checkpoint for reading; each block is compared with its digest before its bytes are first used."""

    def __init__(
        self, source: "Source", record: FileRecord, name: str, *, block: int = BLOCK, digest: Digest = "crc32"
    ) -> None:
        self.source, self.record, self.name, self.block = source, record, name, block
        self._digest = DIGESTS[digest]
        self._scratch = threading.local()
        self._checked = bytearray(len(record.blocks))
        if source.size != record.size:
            raise CheckpointCorruptError(f"{name}: {source.size} bytes, but {record.size} were written")

    def trust(self, blocks: Iterable[int]) -> None:
        """Marks blocks as compared by somebody else."""
        for number in blocks:
            self._checked[number] = 1

    def unchecked(self, begin: int = 0, end: int | None = None) -> list[int]:
        """The blocks that bytes ``begin`` to ``end`` touch and nobody compared yet."""
        stop = self.record.size if end is None else end
        touched = range(begin // self.block, -(-stop // self.block)) if stop > begin else range(0)
        return [number for number in touched if not self._checked[number]]

    def announce(self, number: int) -> None:
        """Tells the system that a block is read soon."""
        self.source.announce(number * self.block, self._length(number))

    def check(self, number: int) -> None:
        """Reads one block and compares it.

        Raises:
            CheckpointCorruptError: names the file and the bytes that differ.
        """
        self._compare(number, self._load(number))

    def jobs(self, wanted: Sequence[tuple[int, memoryview]]) -> Iterator[Callable[[], None]]:
        """Pieces of work that may run in parallel and together fill every ``(begin, view)`` of ``wanted``."""
        by_block: dict[int, list[tuple[int, memoryview]]] = {}
        for begin, view in wanted:
            position = 0
            while position < len(view):
                number, inside = divmod(begin + position, self.block)
                length = min(self.block - inside, len(view) - position)
                by_block.setdefault(number, []).append((inside, view[position : position + length]))
                position += length
        for number, parts in by_block.items():
            yield lambda number=number, parts=parts: self._fill(number, parts)  # type: ignore[misc]

    def read(self, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end``, compared."""
        if end > self.record.size:
            raise CheckpointCorruptError(f"{self.name}: bytes up to {end} expected in a file of {self.record.size}")
        buffer = bytearray(end - begin)
        for job in self.jobs([(begin, memoryview(buffer))]):
            job()
        return bytes(buffer)

    def _fill(self, number: int, parts: list[tuple[int, memoryview]]) -> None:
        start = number * self.block
        if self._checked[number]:
            for inside, view in parts:
                self.source.read_into(view, start + inside)
        elif len(parts) == 1 and len(parts[0][1]) == self._length(number):
            self.source.read_into(parts[0][1], start)
            self._compare(number, parts[0][1])
        else:
            whole = self._load(number)
            self._compare(number, whole)
            for inside, view in parts:
                view[:] = whole[inside : inside + len(view)]

    def _length(self, number: int) -> int:
        return min(self.block, self.record.size - number * self.block)

    def _load(self, number: int) -> memoryview:
        buffer = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = bytearray(min(self.block, self.record.size))
        view = memoryview(buffer)[: self._length(number)]
        self.source.read_into(view, number * self.block)
        return view

    def _compare(self, number: int, view: memoryview) -> None:
        if self._digest([view]) != self.record.blocks[number]:
            begin = number * self.block
            raise CheckpointCorruptError(
                f"{self.name}: bytes {begin} to {begin + len(view)} are not those that were written"
            )
        self._checked[number] = 1


@final
class Source:
    """A local file to read ranges of; links and anything but regular files are refused."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self.handle = os.open(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointCorruptError(f"{path.name}: a link; a checkpoint holds none") from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorruptError(f"{path.name}: the file is missing from {path.parent}") from None
            raise CheckpointError(f"{path}: {error.strerror}") from error
        facts = os.fstat(self.handle)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self.handle)
            raise CheckpointCorruptError(f"{path.name}: not a regular file")
        self.path = path
        self.size = facts.st_size

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fills ``view`` with the bytes from ``begin`` on."""
        while len(view):
            try:
                count = os.preadv(self.handle, [view], begin)
            except OSError as error:
                raise CheckpointCorruptError(f"{self.path.name}: byte {begin} cannot be read: {error}") from error
            if not count:
                raise CheckpointCorruptError(f"{self.path.name}: ends at byte {begin}, while it is read")
            view, begin = view[count:], begin + count

    def announce(self, begin: int, length: int) -> None:
        """Asks the system to fetch a range in the meantime, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, begin, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self.handle)


def run_jobs(jobs: Iterable[Callable[[], None]], threads: int | None = None) -> None:
    """Runs ``jobs`` on several threads; the first failure is raised once none is running any more."""
    count = default_threads() if threads is None else threads
    every = list(jobs)
    if count == 1 or len(every) < 2:
        for job in every:
            job()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="accel-ckpt") as pool:
        waiting = [pool.submit(job) for job in every]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@final
class _Digester:
    """Digests of blocks in order, made by other threads while this one goes on."""

    def __init__(self, threads: int, digest: Callable[[list[memoryview]], str]) -> None:
        self._digest = digest
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="accel-ckpt") if threads else None
        self._done: list[str] = []
        self._waiting: deque[Future[str]] = deque()

    def add(self, views: list[memoryview]) -> None:
        """Takes one more block; waits if too many are on their way, since they may be copies made for this."""
        if self._pool is None:
            self._done.append(self._digest(views))
            return
        if len(self._waiting) >= _IN_FLIGHT:
            self._done.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(self._digest, views))

    def digests(self) -> list[str]:
        """Those of all blocks."""
        while self._waiting:
            self._done.append(self._waiting.popleft().result())
        return self._done

    def __enter__(self) -> "_Digester":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _write_all(handle: int, views: list[memoryview], begin: int) -> None:
    waiting = deque(views)
    while waiting:
        batch = [waiting[number] for number in range(min(len(waiting), _IOV_MAX))]
        count = os.pwritev(handle, batch, begin)
        if not count:
            raise OSError(errno.ENOSPC, "nothing could be written")
        begin += count
        while count:
            first = waiting.popleft()
            if len(first) > count:
                waiting.appendleft(first[count:])
                break
            count -= len(first)


def _start_writeback(handle: int, begin: int, length: int) -> None:
    """Asks Linux to start writing a range now, not when it is told to wait for it; elsewhere nothing is lost."""
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None and length == BLOCK:
        start(handle, ctypes.c_int64(begin), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _explain(error: OSError, path: Path, written: int) -> CheckpointError:
    if error.errno in _NO_SPACE:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        return CheckpointError(
            f"{path}: {error.strerror} after {written} bytes; {free} bytes are free there. Nothing was committed; "
            "earlier checkpoints are intact"
        )
    return CheckpointError(f"{path}: {error.strerror or error}")
