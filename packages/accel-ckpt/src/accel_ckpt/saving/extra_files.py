"""User files in checkpoints behind URLs: written into a local folder, uploaded, and downloaded again."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ckpt.format.blocks import BLOCK, Content, Digest, FileRecord
from accel_ckpt.format.manifest import is_own_name
from accel_ckpt.io.storage import Location, Storage
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_ckpt.loading.checkpoint import Checkpoint


def check_names(names: list[str]) -> None:
    """Raises if a user file has a name that is reserved for the checkpoint's own files.

    Raises:
        CheckpointError: lists the reserved names.
    """
    if taken := [name for name in names if is_own_name(name.partition("/")[0])]:
        raise CheckpointError(f"a hook wrote {', '.join(taken)}, a name that the checkpoint's own files have")


def upload(
    folder: Path, names: list[str], storage: Storage, target: Location, digest: Digest
) -> Mapping[str, FileRecord]:
    """Uploads files of a local folder to ``target``; returns their sizes and digests by name."""
    found: dict[str, FileRecord] = {}
    for name in names:
        path, place = folder / name, target
        for part in name.split("/"):
            place = place / part
        found[name] = storage.write(place, Content(lambda path=path: _pieces(path), path.stat().st_size, digest))  # type: ignore[misc]
    return found


def download(checkpoint: "Checkpoint", folder: Path) -> None:
    """Writes the user files of a checkpoint into a local folder, under their paths.

    Raises:
        CheckpointCorruptError: a block does not match its digest.
    """
    for name in checkpoint.manifest.extra:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("xb") as out:
            for piece in checkpoint.extra_pieces(name):
                out.write(piece)


def _pieces(path: Path) -> "Iterator[memoryview]":
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            yield memoryview(block)
