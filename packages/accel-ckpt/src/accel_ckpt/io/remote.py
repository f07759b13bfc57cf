"""Checkpoints behind URLs of any file system of fsspec: object stores, which have no atomic rename.

The files of a save are in a subfolder of the checkpoint with the id of the save; the manifest beside it is written
last, in one request that creates or replaces it. A URL therefore always holds a complete checkpoint, also during an
overwrite, and objects that no manifest refers to are leftovers. Requests with a transient failure are retried.
"""

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, TypeVar, final

from accel_ckpt.format.blocks import (
    BLOCK,
    DIGESTS,
    ByteSource,
    Content,
    Digest,
    Digester,
    FileRecord,
    UnavailableError,
    in_blocks,
)
from accel_ckpt.format.manifest import BEGUN, MANIFEST, is_subfolder, unpack
from accel_ckpt.io.storage import Location, Storage, Url
from accel_ckpt.io.thread_pool import default_threads
from accel_state.errors import AccelError, CheckpointCorruptError, CheckpointError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
DAY = 86400.0
ATTEMPTS, FIRST_WAIT, LONGEST_WAIT = 6, 0.2, 20.0
"""Number of attempts per request, first and longest wait between them (seconds, doubled, with random jitter)."""
# Names with one of these characters are patterns to fsspec's ``rm``, although to no other operation.
_PATTERN = re.compile(r"[*?[]")
# Errors that a retry does not change.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
    ImportError,
    NotImplementedError,
    AccelError,
)


@final
class RemoteStorage(Storage):
    """Storage operations on one fsspec file system."""

    threads = 8
    cached = False

    def __init__(self, files: Any) -> None:
        self._files = files

    @classmethod
    def of(cls, url: Url) -> "RemoteStorage":
        """Opens the file system of a URL. Credentials and endpoints come from fsspec's configuration and environment.

        Raises:
            CheckpointError: a package is missing, or no fsspec protocol matches the URL.
        """
        try:
            import_module("tenacity")  # so that a missing package is reported before anything is written
            return cls(import_module("fsspec.core").url_to_fs(url.text)[0])
        except ImportError as error:
            raise CheckpointError(
                f"{url}: {error}; URLs need the extra accel-ckpt[remote] and fsspec's package for that protocol"
            ) from error
        except ValueError as error:
            scheme = url.text.partition("://")[0]
            near = get_close_matches(scheme, import_module("fsspec").available_protocols(), n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise CheckpointError(f"{url}: {error}{hint}") from error

    def listing(self, folder: Location) -> Mapping[str, int | None]:
        path = self._path(folder)

        def ask() -> Mapping[str, int | None]:
            self._files.invalidate_cache()
            entries = self._files.ls(path, detail=True)
            if [entry["name"] for entry in entries if entry["type"] != "directory"] == [path]:
                raise FileNotFoundError(f"{folder} is no folder")
            found = {entry["name"].rstrip("/").rpartition("/")[2]: _size(entry) for entry in entries}
            return {name: size for name, size in found.items() if name}

        return self._patiently(f"{folder}", ask)

    def open(self, file: Location) -> ByteSource:
        try:
            size = self._patiently(f"{file}", lambda: int(self._files.info(self._path(file))["size"]))
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{file.name}: the file is missing from {file.parent}") from None
        return _RemoteSource(self, file, size)

    def write(self, file: Location, content: Content) -> FileRecord:
        digest = DIGESTS[content.digest]
        count = default_threads() if content.threads is None else content.threads

        def upload() -> FileRecord:
            written = 0
            with Digester(count, digest) as digester:
                with self._files.open(self._path(file), "wb") as out:
                    for views in in_blocks(content.pieces()):
                        digester.add(views)
                        for view in views:
                            out.write(view)  # of some file systems (SFTP) it does not return the number of bytes
                            written += len(view)
                return FileRecord(written, tuple(digester.digests()))

        if content.size <= BLOCK:
            small = b"".join(content.pieces())
            self.put(file, small)
            return FileRecord(len(small), (digest([small]),) if small else ())
        return self._in_folder(file, upload)

    def put(self, file: Location, content: bytes, *, overwrite: bool = True) -> None:
        """Writes a small file in one request.

        Raises:
            FileExistsError: the file exists with other content, and ``overwrite`` is False.
        """

        def once() -> None:
            try:
                self._files.pipe_file(self._path(file), content, mode="create" if not overwrite else "overwrite")
            except FileExistsError:
                if self.get(file) != content:  # otherwise an earlier attempt succeeded and its response was lost
                    raise

        self._in_folder(file, once)

    def get(self, file: Location, begin: int | None = None, end: int | None = None) -> bytes:
        """Reads a range of a file."""
        path = self._path(file)
        return self._patiently(f"reading {file}", lambda: bytes(self._files.cat_file(path, start=begin, end=end)))

    def ready(self, folder: Location) -> None:
        """Does nothing: an object store has no folders, only names with slashes."""

    def publish(self, files: Mapping[Location, Location]) -> None:
        for written, name in files.items():
            copy = partial(self._files.cp_file, self._path(written), self._path(name))
            self._patiently(f"writing {name}", copy)
            self.remove(written)

    def remove(self, place: Location) -> None:
        """Removes a file, or a folder with all its contents, if it exists."""
        path = self._path(place)

        def ask() -> None:
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                if _PATTERN.search(path) is None:
                    self._files.rm(path, recursive=True)
                else:
                    self._remove_one_by_one(path)

        self._patiently(f"removing {place}", ask)

    def stage(self, target: Location, *, overwrite: bool) -> "_RemoteStaged":
        return _RemoteStaged(self, target, overwrite=overwrite)

    def discard(self, folder: Location) -> None:
        self.remove(folder / MANIFEST)
        self.remove(folder)

    def sweep(self, folder: Location, *, grace: float | None = None) -> list[Location]:
        """Removes leftovers by age; the current time is that of an object written now, i.e. the store's own clock."""
        base = self._path(folder)
        self._files.invalidate_cache()
        every = self._patiently(f"{folder}", lambda: list(self._files.find(base)))
        saves: dict[tuple[str, str], list[str]] = {}
        for path in every:
            name, _, rest = path.removeprefix(base).lstrip("/").partition("/")
            save = rest.partition("/")[0]
            if is_subfolder(save):
                saves.setdefault((name, save), []).append(path)
        old = [key for key in saves if self.committed(folder / key[0]) not in (key[1], None)]
        if not old:
            return []
        now = self._now(folder)
        spared = DAY if grace is None else grace
        removed = []
        for name, save in old:
            youngest = max(map(self._modified, saves[name, save]))
            if (now - youngest).total_seconds() >= spared:
                self.remove(folder / name / save)
                removed.append(folder / name / save)
        return removed

    def committed(self, target: Location) -> str | None:
        """Returns the subfolder in a checkpoint's manifest; empty if there is no manifest, None if it is damaged."""
        try:
            return unpack(self.get(target / MANIFEST)).folder
        except FileNotFoundError:
            return ""
        except CheckpointError:
            return None

    def _in_folder(self, file: Location, write: Callable[[], T]) -> T:
        """Writes a file. A file system with folders refuses one whose folder does not exist, which is created then.

        The first folder of a path is not: it is a bucket or a share, and its name may be a mistake.
        """
        path = self._path(file.parent)

        def once() -> T:
            try:
                return write()
            except FileNotFoundError:
                first = "/" * path.startswith("/") + path.lstrip("/").partition("/")[0]
                if not self._files.exists(first):
                    raise
                self._files.makedirs(path, exist_ok=True)
                return write()

        try:
            return self._patiently(f"writing {file}", once)
        except FileNotFoundError as error:
            raise CheckpointError(f"writing {file}: there is no such place: {error}") from error

    def _remove_one_by_one(self, path: str) -> None:
        for name, entry in reversed(self._files.find(path, withdirs=True, detail=True).items()):
            with suppress(FileNotFoundError):  # in an object store a folder is gone with its last file
                if entry.get("type") == "directory":
                    self._files.rmdir(name)
                else:
                    self._files.rm_file(name)

    def _now(self, folder: Location) -> Any:
        probe = folder / f".clock-{secrets.token_hex(8)}"
        self.put(probe, b"")
        try:
            return self._modified(self._path(probe))
        finally:
            self.remove(probe)

    def _modified(self, path: str) -> Any:
        return self._patiently(path, lambda: self._files.modified(path))

    def _path(self, place: Location) -> str:
        path: str = self._files._strip_protocol(str(place))
        return path

    def _patiently(self, what: str, work: Callable[[], T]) -> T:
        import tenacity

        repeat = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            retry=tenacity.retry_if_exception(_may_pass),
            before_sleep=lambda state: _LOG.info("%s: trying again after %s", what, state.outcome),
            reraise=True,
        )
        try:
            return repeat(work)
        except (FileNotFoundError, FileExistsError, AccelError):
            raise
        except Exception as error:
            tried = f" (tried {ATTEMPTS} times)" if _may_pass(error) else ""
            raise UnavailableError(f"{what}: {type(error).__name__}: {error}{tried}") from error


@final
class _RemoteSource:
    """File of an object store, read by ranges."""

    def __init__(self, storage: RemoteStorage, file: Location, size: int) -> None:
        self._storage, self._file, self.size = storage, file, size

    def read_into(self, begin: int, *views: memoryview) -> None:
        size = sum(map(len, views))
        if not size:
            return
        try:
            content = memoryview(self._storage.get(self._file, begin, begin + size))
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self._file.name}: gone while it is read") from None
        if len(content) != size:
            raise CheckpointCorruptError(f"{self._file.name}: ends at byte {begin + len(content)}, while it is read")
        for view in views:
            view[:], content = content[: len(view)], content[len(view) :]

    def reading(self, begin: int, *views: memoryview) -> Iterator[memoryview]:
        self.read_into(begin, *views)  # one request
        yield from views

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        """Does nothing: no connection is open between requests."""


@final
class _RemoteStaged:
    """Save into a subfolder of its target."""

    def __init__(self, storage: RemoteStorage, target: Location, *, overwrite: bool) -> None:
        self._storage, self._target, self._overwrite = storage, target, overwrite
        self.id = self.subfolder = secrets.token_hex(8)
        self.folder: Location = target / self.id
        self._manifest = b""
        _check_replaceable(storage, target, overwrite=overwrite)
        storage.put(self.folder / BEGUN, b"")

    def brought(self, digest: Digest) -> Mapping[str, FileRecord]:
        return {}

    def seal(self, manifest: bytes) -> None:
        self._manifest = manifest

    def commit(self) -> None:
        before = _check_replaceable(self._storage, self._target, overwrite=self._overwrite)
        try:
            self._storage.put(self._target / MANIFEST, self._manifest, overwrite=self._overwrite)
        except FileExistsError as error:
            raise CheckpointError(f"{self._target}: another run has committed a checkpoint there") from error
        self._clear(self.folder / BEGUN, *(self._target / leftover for leftover in before))

    def drop(self) -> None:
        """Removes the written files, unless the manifest at the target refers to them.

        It may do so in spite of the error that caused the drop: another rank was lost after the commit, or the answer
        to the request for the manifest was. A manifest that cannot be read may refer to them too.
        """
        if self._storage.committed(self._target) not in (self.subfolder, None):
            self._clear(self.folder)

    def _clear(self, *places: Location) -> None:
        """Removes leftovers; one that cannot be removed stays, with a warning, because it is part of no checkpoint."""
        for place in places:
            try:
                self._storage.remove(place)
            except CheckpointError as error:
                _LOG.warning("%s stays behind: %s", place, error)


def _check_replaceable(storage: RemoteStorage, target: Location, *, overwrite: bool) -> list[str]:
    """Returns the paths in a checkpoint at ``target`` that are its own except its manifest, to remove after the commit.

    Raises:
        CheckpointError: other files are there, or a checkpoint that may not be overwritten.
    """
    try:
        names = storage.listing(target)
    except FileNotFoundError:
        return []
    if MANIFEST not in names:
        if others := sorted(name for name in names if not is_subfolder(name)):
            raise CheckpointError(
                f"{target}: a folder with other files is there ({others[0]}); a checkpoint needs a place of its own"
            )
        return []
    if not overwrite:
        raise CheckpointError(f"{target}: a checkpoint is there already; give another place or overwrite=True")
    try:
        replaced = unpack(storage.get(target / MANIFEST))
    except (CheckpointError, FileNotFoundError):  # damaged, or removed meanwhile
        return []
    return [replaced.folder] if replaced.folder else [*replaced.every_file]


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, _FINAL)


def _size(entry: Mapping[str, Any]) -> int | None:
    return None if entry["type"] == "directory" else int(entry["size"])
