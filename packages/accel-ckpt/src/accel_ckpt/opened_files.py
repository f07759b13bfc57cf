"""The files of one checkpoint, each opened when it is first read."""

from collections.abc import Iterator
from typing import final

from accel_ckpt.blocks import CheckedFile
from accel_ckpt.manifest import MANIFEST, Manifest
from accel_ckpt.storage import Location, Storage
from accel_state.errors import CheckpointCorruptError


@final
class OpenedFiles:
    """Files by name, which a checkpoint and its readers share.

    Nothing here refers to the checkpoint, so that the files of one that nobody holds any more are closed at once, and
    not when the garbage collector next looks for cycles.
    """

    def __init__(self, folder: Location, manifest: Manifest, storage: Storage) -> None:
        self._folder, self._manifest, self._storage = folder, manifest, storage
        self._files: dict[str, CheckedFile] = {}

    def __getitem__(self, name: str) -> CheckedFile:
        """One file, open.

        Raises:
            CheckpointCorruptError: the manifest has no such file, or it is missing or of another size.
        """
        if name not in self._files:
            if name not in self._manifest.files:
                raise CheckpointCorruptError(f"{MANIFEST}: no file {name!r}")
            record = self._manifest.files[name]
            source = self._storage.open(self._folder / self._manifest.place_of(name))
            self._files[name] = CheckedFile(
                source, record, name, block=self._manifest.block_size, digest=self._manifest.digest
            )
        return self._files[name]

    def __iter__(self) -> Iterator[CheckedFile]:
        """The files that are open."""
        return iter(self._files.values())

    def close(self) -> None:
        """Closes all of them."""
        for file in self:
            file.source.close()
        self._files.clear()
