"""Files in blocks, each with its own digest: written, digested and verified by several threads at once.

Blocks, instead of one digest per file, let several threads work on one file, and let a reader verify only the blocks
that it needs. Both digests release the GIL. CRC-32 is the default because it detects damage in blocks of this size well
enough and runs at 50 GB/s per thread in zlib-ng, i.e. at memory speed (the standard library's at 4). SHA-256 ran at 1.7
GB/s here, and at a third of that on CPUs without instructions for it, which is slower than their disks. SHA-256 is for
users who sign the manifest's seal and want the signature to cover the tensors (blake2b ran at 0.8 GB/s, md5 at 0.7).
"""

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, final

from zlib_ng import zlib_ng

from accel_state.errors import CheckpointCorruptError, CheckpointError

BLOCK = 8 * 2**20
# Limit on blocks that are written but not yet digested; it bounds memory if blocks are copies of device memory.
_IN_FLIGHT = 32


class UnavailableError(CheckpointError):
    """A checkpoint, which may be intact, cannot be used now: its storage refuses, or a newer version wrote it."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of each of its blocks, in hexadecimal."""

    size: int
    blocks: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Content:
    """Content of a new file: ``size`` bytes from ``pieces``, which may be called again to repeat a write.

    ``threads`` is the number of threads that digest while one thread writes (0: the writing thread digests each piece;
    None: as many as are useful).
    """

    pieces: Callable[[], Iterable[memoryview]]
    size: int
    digest: "Digest" = "crc32"
    threads: int | None = None

    @classmethod
    def of(cls, document: bytes, digest: "Digest" = "crc32") -> "Content":
        """Wraps a small file that is in memory already."""
        return cls(lambda: iter([memoryview(document)]), len(document), digest, 0)


class ByteSource(Protocol):
    """File that ranges are read from, local or remote. ``size`` in bytes."""

    @property
    def size(self) -> int: ...

    def read_into(self, begin: int, *views: memoryview) -> None:
        """Fills ``views`` one after the other with the bytes from ``begin`` on, or raises a CheckpointError."""

    def reading(self, begin: int, *views: memoryview) -> Iterator[memoryview]:
        """Like ``read_into``, but yields each piece as soon as it is filled, while it is still in the CPU's cache."""

    def mapped(self) -> memoryview | None:
        """Returns the full file as a memory map, read on access; None if the source cannot be mapped."""

    def close(self) -> None:
        """Closes the file."""


def read_full(source: ByteSource, name: str, limit: int) -> bytes:
    """Reads all bytes of a file; raises if it has more than ``limit``. ``name`` is the file's name in the message."""
    if source.size > limit:
        raise CheckpointCorruptError(f"{name}: {source.size} bytes, which is more than {limit}")
    return read_range(source, 0, source.size)


def read_range(source: ByteSource, begin: int, end: int) -> bytes:
    """Reads bytes ``begin`` to ``end`` of a file without verifying them."""
    content = bytearray(end - begin)
    source.read_into(begin, memoryview(content))
    return bytes(content)


def sha256(views: Iterable[memoryview | bytes]) -> str:
    """Returns the SHA-256 as 64 hexadecimal digits."""
    sha = hashlib.sha256()
    for view in views:
        sha.update(view)
    return sha.hexdigest()


def crc32(views: Iterable[memoryview | bytes]) -> str:
    """Returns the CRC-32 (as in zlib, gzip and Ethernet) as 8 hexadecimal digits."""
    value = 0
    for view in views:
        value = zlib_ng.crc32(view, value)
    return f"{value:08x}"


Digest = Literal["crc32", "sha256"]
DIGESTS: dict[str, Callable[[Iterable[memoryview | bytes]], str]] = {"crc32": crc32, "sha256": sha256}


def in_blocks(pieces: Iterable[memoryview], block: int = BLOCK) -> Iterator[list[memoryview]]:
    """Splits and groups ``pieces`` so that every group except the last has ``block`` bytes."""
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


@final
class CheckedFile:
    """File of a checkpoint for reading; each block is verified against its digest before its bytes are first used."""

    def __init__(
        self,
        source: ByteSource,
        record: FileRecord,
        name: str,
        *,
        block: int = BLOCK,
        digest: Digest = "crc32",
        scratch: threading.local | None = None,
    ) -> None:
        self.source, self.record, self.name, self.block = source, record, name, block
        self._digest = DIGESTS[digest]
        # Shared by the files of a checkpoint, of which a large run has thousands: a thread works on one at a time.
        self._scratch = threading.local() if scratch is None else scratch
        self._checked = bytearray(len(record.blocks))
        if source.size != record.size:
            raise CheckpointCorruptError(f"{name}: {source.size} bytes, but {record.size} were written")

    def trust(self, blocks: Iterable[int]) -> None:
        """Marks blocks that another rank has verified."""
        for number in blocks:
            self._checked[number] = 1

    @property
    def compared(self) -> list[int]:
        """Blocks that have been verified, by this process or by another rank."""
        return [number for number, done in enumerate(self._checked) if done]

    def unchecked(self, begin: int = 0, end: int | None = None) -> list[int]:
        """Returns the blocks that overlap bytes ``begin`` to ``end`` and have not been verified."""
        touched = self.touched(begin, self.record.size if end is None else end)
        return [number for number in touched if not self._checked[number]]

    def touched(self, begin: int, end: int) -> range:
        """Returns the blocks that overlap bytes ``begin`` to ``end``."""
        return range(begin // self.block, -(-end // self.block)) if end > begin else range(0)

    def check(self, number: int) -> None:
        """Reads one block and verifies it.

        Raises:
            CheckpointCorruptError: names the file and the bytes that differ.
        """
        self._load(number)

    def by_block(self, wanted: Sequence[tuple[int, memoryview]]) -> dict[int, list[tuple[int, memoryview]]]:
        """Splits ``wanted`` (pairs of first byte in the file and memory to fill) at the boundaries of blocks.

        The result maps the number of a block to pairs of first byte in the block and memory.
        """
        by_block: dict[int, list[tuple[int, memoryview]]] = {}
        for begin, view in wanted:
            position = 0
            while position < len(view):
                number, inside = divmod(begin + position, self.block)
                length = min(self.block - inside, len(view) - position)
                by_block.setdefault(number, []).append((inside, view[position : position + length]))
                position += length
        return by_block

    def read(self, begin: int, end: int) -> bytes:
        """Reads bytes ``begin`` to ``end`` and verifies their blocks."""
        if end > self.record.size:
            raise CheckpointCorruptError(f"{self.name}: bytes up to {end} expected in a file of {self.record.size}")
        buffer = bytearray(end - begin)
        for number, parts in self.by_block([(begin, memoryview(buffer))]).items():
            self.fill(number, parts)
        return bytes(buffer)

    def read_block(self, number: int, view: memoryview) -> None:
        """Reads a full block into ``view`` and verifies it."""
        self._read_compared(number, view)

    def fill(self, number: int, parts: Sequence[tuple[int, memoryview]], *, compare: bool = True) -> None:
        """Reads ``parts`` of a block, as ``by_block`` returns them; ``compare`` verifies a block that is unverified.

        Raises:
            CheckpointCorruptError: names the file and the bytes that differ.
        """
        if self._checked[number] or not compare:
            for inside, view in parts:
                self.source.read_into(number * self.block + inside, view)
            return
        views = self._completed(number, parts)
        if views is not None:
            self._read_compared(number, *views)
            return
        whole = self._load(number)
        for inside, view in parts:
            view[:] = whole[inside : inside + len(view)]

    def content(self, begin: int, end: int) -> memoryview:
        """Returns bytes ``begin`` to ``end``, verified; mapped if possible, so that only accessed pages are read."""
        memory = self.source.mapped()
        if memory is None:
            return memoryview(bytearray(self.read(begin, end)))
        for number in self.unchecked(begin, end):
            self.check(number)
        return memory[begin:end]

    def length(self, number: int) -> int:
        """Returns the size of a block in bytes; the last block of a file may be short."""
        return min(self.block, self.record.size - number * self.block)

    def _completed(self, number: int, parts: Sequence[tuple[int, memoryview]]) -> list[memoryview] | None:
        """Returns ``parts`` in order, with scratch memory for gaps, so that a block is read directly into its targets.

        None if some bytes have two targets.
        """
        scratch = self._room(number)
        views: list[memoryview] = []
        position = 0
        for inside, view in sorted(parts, key=lambda part: part[0]):
            if inside < position:
                return None
            views += [scratch[position:inside], view]
            position = inside + len(view)
        return [*views, scratch[position:]]

    def _load(self, number: int) -> memoryview:
        view = self._room(number)
        self._read_compared(number, view)
        return view

    def _room(self, number: int) -> memoryview:
        """Returns this thread's scratch memory for a block, reused for the next block."""
        buffer, size = getattr(self._scratch, "buffer", b""), min(self.block, self.record.size)
        if len(buffer) < size:
            # Mapped, so that it is freed with its thread: allocators keep memory that many threads have freed.
            buffer = self._scratch.buffer = mmap.mmap(-1, size)
            with suppress(OSError, AttributeError):  # a system without huge pages, as in ``huge_pages``
                buffer.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(buffer)[: self.length(number)]

    def _read_compared(self, number: int, *views: memoryview) -> None:
        """Reads a block into ``views`` and digests each piece while it is in the CPU's cache."""
        begin = number * self.block
        if self._digest(self.source.reading(begin, *views)) != self.record.blocks[number]:
            raise CheckpointCorruptError(
                f"{self.name}: bytes {begin} to {begin + self.length(number)} are not those that were written"
            )
        self._checked[number] = 1


@final
class Digester:
    """Digests blocks in other threads while the calling thread continues; results are in order."""

    def __init__(self, threads: int, digest: Callable[[list[memoryview]], str]) -> None:
        self._digest = digest
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="accel-ckpt") if threads else None
        self._done: list[str] = []
        self._waiting: deque[Future[str]] = deque()

    def add(self, views: list[memoryview]) -> None:
        """Queues one more block; waits if too many are queued, because queued blocks may be copies."""
        if self._pool is None:
            self._done.append(self._digest(views))
            return
        if len(self._waiting) >= _IN_FLIGHT:
            self._done.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(self._digest, views))

    def digests(self) -> list[str]:
        """Waits for all blocks and returns their digests in order."""
        while self._waiting:
            self._done.append(self._waiting.popleft().result())
        return self._done

    def __enter__(self) -> "Digester":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
