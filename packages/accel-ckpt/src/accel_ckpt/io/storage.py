"""Storage of checkpoints: local folders or prefixes of an object store, behind one interface.

A location is a ``Path``, or a ``Url`` of any file system of fsspec. The two kinds differ in the atomic commit: a folder
is renamed, while in an object store the manifest is written last.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, final

from accel_ckpt.format.blocks import ByteSource, Content, Digest, FileRecord
from accel_state.errors import CheckpointError

_LOCAL_SCHEMES = ("file", "local")
_SHORTENED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


@final
@dataclass(frozen=True, slots=True, order=True)
class Url:
    """Location named by a URL, with the path operations that apply to URLs."""

    text: str

    @property
    def name(self) -> str:
        """Last component."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """URL without its last component."""
        head = self.text.rpartition("/")[0]
        return self if head.endswith("/") else Url(head)

    def __truediv__(self, part: str) -> "Url":
        return Url(f"{self.text.rstrip('/')}/{part}")

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text


Location = Path | Url


def locate(place: str | os.PathLike[str], *, base: Path | None = None) -> Location:
    """Converts a text, path or URL to a location.

    A relative path is below ``base``; None: the working directory.

    Raises:
        CheckpointError: ``place`` is none of them, is empty, holds a NUL character or one without an encoding, is in
            the home of an unknown user, or was a URL and became a path before, which drops one of its slashes.
    """
    if isinstance(place, Url):
        return place
    text = _text(place)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in _LOCAL_SCHEMES:
        if not rest.strip("/"):
            raise CheckpointError(f"{text!r} names no folder; expected one, like {f'{scheme}://bucket/checkpoint'!r}")
        return Url(text.rstrip("/"))
    if _SHORTENED.match(text) and not separator:
        raise CheckpointError(f"{text!r} was a URL before it became a path; give it as text")
    try:
        path = Path(rest if separator else text).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{text!r}: the home of this user is unknown; nearest: {f'./{text}'!r}") from error
    return path.absolute() if base is None else base / path


def _text(place: object) -> str:
    text = os.fspath(place) if isinstance(place, str | bytes | os.PathLike) else place
    if isinstance(text, bytes):
        raise CheckpointError(f"{place!r}: expected a folder as text or as a path; nearest: {os.fsdecode(text)!r}")
    if not isinstance(text, str):
        raise CheckpointError(
            f"{place!r} is of type {type(place).__name__}; expected a folder as text or as a path; nearest: "
            f"{str(place)!r}"
        )
    if not text:
        raise CheckpointError(f"{place!r} names no folder; expected one as text or as a path, like './checkpoint'")
    if "\0" in text:
        raise CheckpointError(
            f"{text!r} holds the character NUL, which no path has; nearest: {text.replace(chr(0), '')!r}"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{text!r} holds a character that no path has: {error.reason}") from error
    return text


class Staged(Protocol):
    """Checkpoint before its commit; only the process that created it may commit or drop it."""

    id: str
    folder: Location
    """Folder that all ranks write into."""
    subfolder: str
    """Subfolder of the files in the committed checkpoint; empty: the files are directly in it."""

    def brought(self, digest: Digest) -> "Mapping[str, FileRecord]":
        """Syncs and records the files that are in ``folder``, by path; called before the ranks write theirs."""

    def seal(self, manifest: bytes) -> None:
        """Writes the manifest; everything that may need disk space is done before ``commit``."""

    def commit(self) -> None:
        """Makes the sealed checkpoint appear at its target, and removes the previous checkpoint."""

    def drop(self) -> None:
        """Removes the written files; the target is unchanged."""


class Storage(ABC):
    """Operations of one kind of location. All of them raise CheckpointError if the storage refuses."""

    threads: int
    """Number of concurrent reads that keep the storage busy."""
    cached: ClassVar[bool]
    """Whether a file that one process has read is in a cache for all processes of its machine."""

    @abstractmethod
    def listing(self, folder: Location) -> Mapping[str, int | None]:
        """Returns the names in a folder with the sizes of files in bytes, None for folders, -1 for links and devices.

        Raises:
            FileNotFoundError: the folder does not exist.
        """

    def names(self, folder: Location) -> Collection[str]:
        """Returns the names in a folder; FileNotFoundError as ``listing``."""
        return self.listing(folder)

    @abstractmethod
    def open(self, file: Location) -> ByteSource:
        """Opens a file for reading; CheckpointCorruptError if it does not exist."""

    @abstractmethod
    def write(self, file: Location, content: Content) -> FileRecord:
        """Writes a new file and returns once it is durable."""

    @abstractmethod
    def ready(self, folder: Location) -> None:
        """Creates a folder to write into, with its parents, if the storage has folders."""

    @abstractmethod
    def publish(self, files: Mapping[Location, Location]) -> None:
        """Renames files within their folders, one by one; each rename is atomic and replaces an existing file."""

    @abstractmethod
    def remove(self, place: Location) -> None:
        """Removes a file if it exists."""

    @abstractmethod
    def stage(self, target: Location, *, overwrite: bool) -> Staged:
        """Begins a checkpoint at ``target``."""

    @abstractmethod
    def discard(self, folder: Location) -> None:
        """Removes a checkpoint, so that at any time it is complete or gone."""

    @abstractmethod
    def sweep(self, folder: Location, *, grace: float | None = None) -> list[Location]:
        """Removes leftovers of killed saves in ``folder``; possibly live ones only if older than ``grace`` seconds."""


def storage_of(place: Location) -> Storage:
    """Returns the storage for a location."""
    if isinstance(place, Url):
        from accel_ckpt.io.remote import RemoteStorage

        return RemoteStorage.of(place)
    from accel_ckpt.io.local import LocalStorage

    return LocalStorage()


@contextmanager
def staged_at(target: Location, *, overwrite: bool) -> Iterator[tuple[Storage, Staged]]:
    """Context in which one process writes a checkpoint; at its end the sealed one is committed, or an error drops it.

    Raises:
        CheckpointError: ``target`` is taken or cannot be written.
    """
    storage = storage_of(target)
    staged = storage.stage(target, overwrite=overwrite)
    try:
        yield storage, staged
        staged.commit()
    except BaseException:
        staged.drop()
        raise


def is_folder(storage: Storage, folder: Location) -> bool:
    """Whether ``folder`` exists and is a folder."""
    try:
        storage.names(folder)
    except FileNotFoundError:
        return False
    return True
