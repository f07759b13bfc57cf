"""The files of one checkpoint, each opened when it is first read."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

from accel_ckpt.format.blocks import CheckedFile
from accel_ckpt.format.manifest import MANIFEST, Manifest
from accel_ckpt.io.storage import Location, Storage
from accel_state.errors import CheckpointCorruptError


@final
class OpenedFiles:
    """Open files by name, shared by a checkpoint and its readers.

    This object does not refer to the checkpoint, so that there is no reference cycle: the files are closed as soon as
    the last reference to the checkpoint is dropped.
    """

    def __init__(self, folder: Location, manifest: Manifest, storage: Storage) -> None:
        self._folder, self._manifest, self._storage = folder, manifest, storage
        self._files: dict[str, CheckedFile] = {}
        self._scratch = threading.local()

    def __getitem__(self, name: str) -> CheckedFile:
        """Returns a file, opened.

        Raises:
            CheckpointCorruptError: the manifest has no such file, or it is missing or of another size.
        """
        if name not in self._files:
            record = self._manifest.files.get(name) or self._manifest.extra.get(name)
            if record is None:
                raise CheckpointCorruptError(f"{MANIFEST}: no file {name!r}")
            place = self._folder
            *above, last = self._manifest.place_of(name).split("/")
            for part in above:
                place = place / part
                if isinstance(place, Path) and place.is_symlink():
                    raise CheckpointCorruptError(f"{part}: a link; a checkpoint holds none")
            source = self._storage.open(place / last)
            self._files[name] = CheckedFile(
                source,
                record,
                name,
                block=self._manifest.block_size,
                digest=self._manifest.digest,
                scratch=self._scratch,
            )
        return self._files[name]

    def __iter__(self) -> Iterator[CheckedFile]:
        """Iterates over the open files."""
        return iter(self._files.values())

    def close(self) -> None:
        """Closes all files."""
        for file in self:
            file.source.close()
        self._files.clear()
