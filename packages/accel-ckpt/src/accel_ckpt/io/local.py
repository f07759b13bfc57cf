"""Checkpoints in folders of a file system that all ranks see; a rename commits a folder."""

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

from accel_ckpt.format.blocks import Content, FileRecord, UnavailableError
from accel_ckpt.io.atomic_folder import Staging, discard, make_folder, sweep, sync_folder
from accel_ckpt.io.local_files import FileSource, write_file
from accel_ckpt.io.storage import Location, Storage
from accel_ckpt.io.thread_pool import default_threads
from accel_state.errors import CheckpointError


@final
class LocalStorage(Storage):
    """Storage operations on local folders."""

    cached = True

    def __init__(self) -> None:
        self.threads = default_threads()

    def listing(self, folder: Location) -> Mapping[str, int | None]:
        with _refusals(folder), os.scandir(_path(folder)) as entries:
            return {entry.name: _size(entry) for entry in entries}

    def names(self, folder: Location) -> Collection[str]:
        with _refusals(folder):
            return os.listdir(_path(folder))

    def open(self, file: Location) -> FileSource:
        return FileSource(_path(file))

    def write(self, file: Location, content: Content) -> FileRecord:
        return write_file(_path(file), content)

    def ready(self, folder: Location) -> None:
        try:
            make_folder(_path(folder))
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error

    def publish(self, files: Mapping[Location, Location]) -> None:
        try:
            for written, name in files.items():
                os.replace(_path(written), _path(name))
            for folder in {_path(name).parent for name in files.values()}:
                sync_folder(folder)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be written: {error.strerror}") from error

    def remove(self, place: Location) -> None:
        try:
            _path(place).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{place}: cannot be removed: {error.strerror}") from error

    def stage(self, target: Location, *, overwrite: bool) -> Staging:
        return Staging(_path(target), overwrite=overwrite)

    def discard(self, folder: Location) -> None:
        discard(_path(folder))

    def sweep(self, folder: Location, *, grace: float | None = None) -> list[Location]:
        try:
            return [*(sweep(_path(folder)) if grace is None else sweep(_path(folder), grace))]
        except OSError as error:
            raise CheckpointError(f"{folder}: leftovers cannot be removed: {error.strerror}") from error


@contextmanager
def _refusals(folder: Location) -> Iterator[None]:
    """Context in which the system's errors become those of ``Storage.listing``."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a link to itself is no folder
            raise FileNotFoundError(f"{folder} is no folder") from error
        raise UnavailableError(f"{folder}: {error.strerror}") from error


def _path(place: Location) -> Path:
    assert isinstance(place, Path), place
    return place


def _size(entry: "os.DirEntry[str]") -> int | None:
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # removed in the meantime
        return -1
    if stat.S_ISDIR(facts.st_mode):
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else -1
