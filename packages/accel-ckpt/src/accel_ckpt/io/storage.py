"""Storage of checkpoints: folders of a file system or prefixes of an object store, behind one set of operations.

A place is a ``Path``, or a ``Url`` of any file system that fsspec knows. What differs is how a checkpoint appears at
once: folders are renamed, while an object store gets a checkpoint's manifest last.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, final

from accel_ckpt.format.blocks import ByteSource, Content, FileRecord
from accel_state.errors import CheckpointError

_LOCAL_SCHEMES = ("file", "local")
_SHORTENED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


@final
@dataclass(frozen=True, slots=True, order=True)
class Url:
    """A place named by a URL, with the few operations of a path that make sense for one."""

    text: str

    @property
    def name(self) -> str:
        """The last part."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """Without the last part."""
        head = self.text.rpartition("/")[0]
        return self if head.endswith("/") else Url(head)

    def __truediv__(self, part: str) -> "Url":
        return Url(f"{self.text.rstrip('/')}/{part}")

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text


Location = Path | Url


def locate(place: str | os.PathLike[str]) -> Location:
    """The place that a text, path or URL names.

    Raises:
        CheckpointError: a URL was made into a path, which has eaten one of its slashes.
    """
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in _LOCAL_SCHEMES:
        return Url(text.rstrip("/"))
    if _SHORTENED.match(text) and not separator:
        raise CheckpointError(f"{text!r} was a URL before it became a path; give it as text")
    return Path(rest if separator else text).expanduser().absolute()


class Staged(Protocol):
    """A checkpoint in the making; only the process that made this commits or drops it."""

    id: str
    folder: Location
    """Into which all ranks write."""
    subfolder: str
    """Where the files lie within the committed checkpoint; empty: directly in it."""

    def brought(self) -> "Mapping[str, FileRecord]":
        """Files that somebody else has put into ``folder``, by path, surely kept; for before the ranks write theirs."""

    def seal(self, manifest: bytes) -> None:
        """Completes what is written by its manifest; all that may need space is done before ``commit``."""

    def commit(self) -> None:
        """Makes the sealed checkpoint appear at its place, and removes what was there before."""

    def drop(self) -> None:
        """Removes what was written; what was at the place stays."""


class Storage(ABC):
    """The operations of one kind of place. All of them raise CheckpointError for what the place refuses."""

    threads: int
    """How many reads at a time keep it busy."""
    cached: ClassVar[bool]
    """Whether a machine keeps what one of its processes has read for the others."""

    @abstractmethod
    def listing(self, folder: Location) -> Mapping[str, int | None]:
        """The names in a folder: sizes in bytes of files, None for folders, -1 for anything else (links, devices).

        Raises:
            FileNotFoundError: there is no such folder.
        """

    @abstractmethod
    def open(self, file: Location) -> ByteSource:
        """A file for reading; CheckpointCorruptError if there is none."""

    @abstractmethod
    def write(self, file: Location, content: Content) -> FileRecord:
        """Writes a new file and returns once it is safe."""

    @abstractmethod
    def ready(self, folder: Location) -> None:
        """Makes a folder to write into, with those above it, where there have to be any."""

    @abstractmethod
    def publish(self, files: Mapping[Location, Location]) -> None:
        """Gives files other names in the same folder, one after the other, each at once; what had them is replaced."""

    @abstractmethod
    def remove(self, place: Location) -> None:
        """Removes a file, if it is there."""

    @abstractmethod
    def stage(self, target: Location, *, overwrite: bool) -> Staged:
        """Begins a checkpoint at ``target``."""

    @abstractmethod
    def discard(self, folder: Location) -> None:
        """Removes a checkpoint, so that it is either whole or gone."""

    @abstractmethod
    def sweep(self, folder: Location, *, grace: float | None = None) -> list[Location]:
        """Removes what killed saves left in ``folder``. ``grace``: seconds for which what may be alive is spared."""


def storage_of(place: Location) -> Storage:
    """The operations of the kind of place that this is."""
    if isinstance(place, Url):
        from accel_ckpt.io.remote import RemoteStorage

        return RemoteStorage.of(place)
    from accel_ckpt.io.local import LocalStorage

    return LocalStorage()


def is_folder(storage: Storage, folder: Location) -> bool:
    """Whether there is such a folder."""
    try:
        storage.listing(folder)
    except FileNotFoundError:
        return False
    return True
