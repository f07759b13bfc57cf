"""Atomic folder: written in a staging folder beside the target, and renamed to the target at the end.

The staging folder is called ``.<name>.<id>.staging``, and its writer holds a lock on ``.<name>.<id>.lock`` beside it.
The operating system releases the lock when the writer's process ends for any reason; this distinguishes leftovers from
folders that another run is writing at the moment.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import final

from accel_ckpt.format.blocks import Content, Digest, FileRecord
from accel_ckpt.format.manifest import MANIFEST, is_own_name, unpack
from accel_ckpt.io.local_files import read_record, write_file
from accel_ckpt.io.storage import Location
from accel_ckpt.saving.extra_files import check_names
from accel_state.errors import CheckpointError

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{16})\.(?P<kind>staging|lock|replaced)", re.DOTALL)
# A lock file is created just before its folder; a folder younger than this is left alone, as its lock may follow.
YOUNG = 60.0
# The file system's clock may be ahead of this machine's by this much (seconds).
FUTURE = 86400.0
_AT_FDCWD, _EXCHANGE = -100, 2
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


@final
class Staging:
    """Staging folder of a checkpoint for ``target``. Only the process that created it may commit or drop it."""

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self.target = target
        self.overwrite = overwrite
        self.id = secrets.token_hex(8)
        self.folder: Location = target.parent / f".{target.name}.{self.id}.staging"
        self.subfolder = ""
        self._lock = target.parent / f".{target.name}.{self.id}.lock"
        try:
            make_folder(target.parent)
            sweep(target.parent, only=target.name)
            check_replaceable(target, overwrite=overwrite)
            self._handle: int | None = _take_lock(self._lock)
            try:
                self._path.mkdir()
            except OSError:
                self._release()
                raise
        except OSError as error:
            raise CheckpointError(f"{target}: cannot be written: {error.strerror}: {error.filename}") from error

    @property
    def _path(self) -> Path:
        return Path(self.folder)

    def brought(self, digest: Digest) -> Mapping[str, FileRecord]:
        names = files_below(self._path)
        check_names(names)
        return {name: read_record(self._path / name, digest) for name in names}

    def seal(self, manifest: bytes) -> None:
        """Writes the manifest, which completes the folder, and syncs the folder."""
        write_file(self._path / MANIFEST, Content.of(manifest))
        try:
            sync_folder(self._path)
        except OSError as error:
            raise CheckpointError(f"{self.target}: cannot be written: {error.strerror}") from error

    def commit(self) -> None:
        """Renames the folder to its target, syncs, and removes the checkpoint that was there before."""
        try:
            check_replaceable(self.target, overwrite=self.overwrite)
            _keep_foreign(self.target, self._path)
            replaced = self._move()
            sync_folder(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target}: cannot be committed: {error.strerror}") from error
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._release()

    def drop(self) -> None:
        """Removes the staging folder; the target is unchanged.

        The folder is renamed first, so that a rank that still writes fails instead of adding files during the removal.
        """
        aside = self.target.parent / f".{self.target.name}.{secrets.token_hex(8)}.staging"
        with suppress(OSError):
            os.rename(self._path, aside)
        shutil.rmtree(aside, ignore_errors=True)
        self._release()

    def _move(self) -> Path | None:
        """Renames the folder to the target; returns the new path of the previous checkpoint, None if there was none."""
        if not self.target.exists():
            try:
                os.rename(self._path, self.target)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self.overwrite:
                    raise
        elif not any(self.target.iterdir()):
            os.rename(self._path, self.target)  # replaces an empty folder
            return None
        if _exchange(self._path, self.target):
            return self._path
        aside = self.target.parent / f".{self.target.name}.{self.id}.replaced"
        os.rename(self.target, aside)
        try:
            os.rename(self._path, self.target)
        except OSError:
            os.rename(aside, self.target)
            raise
        return aside

    def _release(self) -> None:
        if self._handle is not None:
            self._lock.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


def files_below(folder: Path) -> list[str]:
    """Returns the sorted paths of all files in ``folder`` and its subfolders, after syncing each of them.

    Raises:
        CheckpointError: an entry is a link, or neither a file nor a folder.
    """
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            entry = Path(place, name)
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                raise CheckpointError(f"{entry} is a link or no regular file, which a checkpoint does not hold")
        found += [Path(place, name).relative_to(folder).as_posix() for name in names]
        for name in names:
            sync_folder(Path(place, name))
        sync_folder(Path(place))
    return sorted(found)


def _keep_foreign(target: Path, staged: Path) -> None:
    """Links into the new checkpoint the files that users put beside the files of the checkpoint that it replaces."""
    names = [entry.name for entry in target.iterdir()] if target.is_dir() else []
    strange = [name for name in names if not is_own_name(name)]
    if not strange:
        return
    try:
        known = unpack((target / MANIFEST).read_bytes()).extra
    except (OSError, CheckpointError):
        known = {}
    for name in strange:
        for path in _files_and_links(target / name):
            place = staged / path.relative_to(target)
            if path.relative_to(target).as_posix() in known or place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place, follow_symlinks=False)
            except OSError:  # a file system without links
                shutil.copy2(path, place, follow_symlinks=False)


def _files_and_links(entry: Path) -> Iterator[Path]:
    """Yields ``entry`` unless it is a folder; for a folder, everything below it that is not a folder."""
    if entry.is_symlink() or not entry.is_dir():
        yield entry
        return
    for below in entry.iterdir():
        yield from _files_and_links(below)


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raises unless ``target`` is absent, an empty folder, or a checkpoint that may be overwritten.

    The working directory is neither, because this process would be in a removed folder after it was replaced. A mount
    point cannot be renamed.

    Raises:
        CheckpointError: names the object at ``target``.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target}: a {'link' if target.is_symlink() else 'file'} is there; give another place")
    if not target.exists():
        return
    if (fixed := _why_fixed(target)) is not None:
        raise CheckpointError(
            f"{target} is {fixed}, and a save replaces its target by a rename; give a folder in it: "
            f"{target / 'checkpoint'}"
        )
    if (target / MANIFEST).exists():
        if not overwrite:
            raise CheckpointError(f"{target}: a checkpoint is there already; give another place or overwrite=True")
    elif any(target.iterdir()):
        raise CheckpointError(f"{target}: a folder with other files is there; a checkpoint needs a place of its own")


def _why_fixed(folder: Path) -> str | None:
    """Why an existing folder cannot be replaced by another; None: it can."""
    if folder.is_mount():
        return "a mount point"
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return None
    return "the working directory, or holds it" if here.is_relative_to(folder.resolve()) else None


def sweep(folder: Path, grace: float = YOUNG, *, only: str | None = None) -> list[Path]:
    """Removes leftovers of killed saves in ``folder``; restores checkpoints that a killed overwrite had moved aside.

    With ``only``, only leftovers of saves to that name.

    Folders whose writer is alive, in this process or another one that sees the same locks, are left alone. A folder
    without a lock file is left alone while it is younger than ``grace`` seconds.
    """
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        match = _HIDDEN.fullmatch(name)
        if match is not None and only in (None, match["name"]) and not (entry := folder / name).is_symlink():
            groups.setdefault((match["name"], match["id"]), {})[match["kind"]] = entry
    removed: list[Path] = []
    for (name, identity), entries in groups.items():
        lock = folder / f".{name}.{identity}.lock"
        with _claimed(lock, entries.values(), grace) as ours:
            if ours:
                removed += _clear(folder / name, entries)
                lock.unlink(missing_ok=True)
    return removed


def discard(path: Path) -> None:
    """Removes a folder atomically, by renaming it first; after a kill in between, ``sweep`` removes the rest.

    Of a link to a folder only the link is removed.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    identity = secrets.token_hex(8)
    lock = path.parent / f".{path.name}.{identity}.lock"
    aside = path.parent / f".{path.name}.{identity}.staging"
    try:
        handle = _take_lock(lock)
        try:
            os.rename(path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        finally:
            lock.unlink(missing_ok=True)
            os.close(handle)
    except FileNotFoundError:  # another run has removed it
        return
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from error


def make_folder(path: Path) -> None:
    """Creates a folder with its missing parents, and syncs the folders that they are in.

    Otherwise a power cut could take the folder of a project with the checkpoints in it.
    """
    missing = list(takewhile(lambda place: not place.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        with suppress(PermissionError):  # a folder may be written into and not opened
            sync_folder(place.parent)


def sync_folder(path: Path) -> None:
    """Syncs a folder: waits until the names in ``path`` are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot sync a folder and do not need to
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _clear(target: Path, entries: Mapping[str, Path]) -> list[Path]:
    """Restores or removes the leftovers of one dead writer; returns their paths."""
    removed = []
    for kind, entry in sorted(entries.items()):  # the checkpoint that was moved aside is restored first
        if kind == "replaced" and not target.exists():
            os.rename(entry, target)
        elif kind != "lock":
            shutil.rmtree(entry, ignore_errors=True)
        else:
            continue
        removed.append(entry)
    return removed


def _take_lock(path: Path) -> int:
    """Creates and locks a new lock file; raises if a sweep removed it between creation and locking."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lost = os.fstat(handle).st_nlink == 0
    except OSError as error:
        lost = error.errno in _BUSY  # another error: the file system has no locks, and sweeps leave the folder alone
    if lost:
        os.close(handle)
        raise CheckpointError(f"{path}: a sweep took the lock of this save at its very begin; save again")
    return handle


@contextmanager
def _claimed(lock: Path, entries: Iterable[Path], grace: float) -> Iterator[bool]:
    """Holds the lock of a dead writer; yields False if the writer may be alive. Without a lock file, age decides."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield not any(_is_young(entry, grace) for entry in entries)
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except OSError:  # the lock is held, or this file system has no locks
            ours = False
        yield ours
    finally:
        os.close(handle)


def _is_young(entry: Path, grace: float) -> bool:
    """Whether ``entry`` is younger than ``grace``; a time more than FUTURE ahead is a wrong clock, hence not young."""
    try:
        return -FUTURE < time.time() - entry.lstat().st_mtime < grace
    except OSError:
        return True


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names atomically if the system supports it (Linux: renameat2); otherwise returns False."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    result = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
