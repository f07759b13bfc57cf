"""Local files: synced writes, reads of ranges, memory maps."""

import ctypes
import errno
import mmap
import os
import resource
import shutil
import stat
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import final

from accel_ckpt.format.blocks import BLOCK, DIGESTS, Content, Digest, Digester, FileRecord, UnavailableError, in_blocks
from accel_ckpt.io.thread_pool import default_threads
from accel_state.errors import CheckpointCorruptError, CheckpointError

_IOV_MAX = 1024
_SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_ALL = 2, 7
# Bytes of a file written in the background that stay in the page cache. Their pages are reused for the following
# blocks, whereas the pages of a full checkpoint would be taken from the free memory of the system or of a virtual
# machine's host.
_KEPT = 4 * BLOCK
# Bytes of one read. The kernel reads ahead while these are copied, and starts late after a long read.
_AT_ONCE = 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: Content) -> FileRecord:
    """Writes the new file ``path`` and waits until it is on disk.

    The calling thread writes, other threads digest the written blocks. The kernel is asked to start writing each block
    out at once, so that the disk and the digests do not wait for each other.

    Raises:
        CheckpointError: the disk is full (with the bytes needed and free), or the write fails.
    """
    threads = default_threads() if content.threads is None else content.threads
    written = 0
    digests: list[str] = []
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            with Digester(threads, DIGESTS[content.digest]) as digester:
                for views in in_blocks(content.pieces()):
                    length = sum(map(len, views))
                    waiting, begin = deque(views), written
                    while waiting:
                        count = os.pwritev(handle, list(islice(waiting, _IOV_MAX)), begin)
                        if not count:
                            raise OSError(errno.ENOSPC, "nothing could be written")
                        deque(_taken(waiting, count), maxlen=0)
                        begin += count
                    _sync_range(handle, written, length, _SYNC_FILE_RANGE_WRITE)
                    if not threads and written >= _KEPT:
                        _let_go(handle, written - _KEPT)
                    digester.add(views)
                    written += length
                os.fsync(handle)
                digests = digester.digests()
        finally:
            os.close(handle)
    except OSError as error:
        raise _explain(error, path, written, content.size) from error
    return FileRecord(written, tuple(digests))


def read_record(path: Path, digest: Digest) -> FileRecord:
    """Returns size and digests of an existing file."""
    digests: list[str] = []
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digests.append(DIGESTS[digest]([block]))
        return FileRecord(file.tell(), tuple(digests))


@final
class FileSource:
    """Regular file of this machine, open for reading; links and other kinds of files are refused."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self.handle = _open(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointCorruptError(f"{path.name}: a link; a checkpoint holds none") from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorruptError(f"{path.name}: the file is missing from {path.parent}") from None
            raise UnavailableError(f"{path}: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self.handle)
        """Closes the file, as dropping the last reference does; its memory map stays valid while it is referenced."""
        facts = os.fstat(self.handle)
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointCorruptError(f"{path.name}: not a regular file")
        self.path = path
        self.size = facts.st_size
        self._memory: memoryview | None = None

    def read_into(self, begin: int, *views: memoryview) -> None:
        """Fills ``views`` one after the other with the bytes from ``begin`` on."""
        deque(self.reading(begin, *views), maxlen=0)

    def reading(self, begin: int, *views: memoryview) -> Iterator[memoryview]:
        """Like ``read_into``, but yields each piece as soon as it is filled."""
        waiting = deque(view for view in views if len(view))
        while waiting:
            try:
                count = os.preadv(self.handle, _first(waiting, _AT_ONCE), begin)
            except OSError as error:
                raise UnavailableError(f"{self.path}: byte {begin} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointCorruptError(f"{self.path.name}: ends at byte {begin}, while it is read")
            yield from _taken(waiting, count)
            begin += count

    def mapped(self) -> memoryview:
        """Maps the file; copy-on-write, because torch has no read-only tensors (no code writes to the map)."""
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(self.handle, self.size, access=mmap.ACCESS_COPY))
        return self._memory


def _open(path: Path, flags: int) -> int:
    """Opens a file. The limit on open files is doubled when it is reached: a large run has more than the usual 1024."""
    while True:
        try:
            return os.open(path, flags)
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
            if error.errno != errno.EMFILE or more <= soft:
                raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _first(waiting: deque[memoryview], size: int) -> list[memoryview]:
    """Returns views of at most ``size`` bytes from the front of ``waiting``, for one system call."""
    views: list[memoryview] = []
    for view in islice(waiting, _IOV_MAX):
        views.append(view[:size])
        size -= len(view)
        if size <= 0:
            break
    return views


def _taken(waiting: deque[memoryview], count: int) -> Iterator[memoryview]:
    """Removes the first ``count`` bytes from ``waiting`` and yields them."""
    while count:
        first = waiting.popleft()
        if len(first) > count:
            waiting.appendleft(first[count:])
        yield first[:count]
        count -= min(count, len(first))


def _sync_range(handle: int, begin: int, length: int, how: int) -> None:
    """Makes Linux start writing out a full block before the fsync; does nothing on other systems."""
    sync = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync is not None and length == BLOCK:
        sync(handle, ctypes.c_int64(begin), ctypes.c_int64(length), ctypes.c_uint(how))


def _let_go(handle: int, begin: int) -> None:
    """Waits until a block is on disk, and drops it from the page cache."""
    if hasattr(os, "posix_fadvise"):
        _sync_range(handle, begin, BLOCK, _SYNC_FILE_RANGE_ALL)
        os.posix_fadvise(handle, begin, BLOCK, os.POSIX_FADV_DONTNEED)


def _explain(error: OSError, path: Path, written: int, size: int) -> CheckpointError:
    if error.errno in _NO_SPACE:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        return CheckpointError(
            f"{path}: {error.strerror} after {written} bytes of the {size} that it needs; {free} bytes are free there. "
            "Nothing was committed; earlier checkpoints are intact"
        )
    return CheckpointError(f"{path}: {error.strerror or error}")
