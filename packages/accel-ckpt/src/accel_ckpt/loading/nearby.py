"""Places near one that is no checkpoint, for error messages: files, neighbours with such a name, checkpoints below."""

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches

from accel_ckpt.format.manifest import MANIFEST
from accel_ckpt.io.storage import Location, Storage, is_folder
from accel_state.errors import CheckpointError

_LOOKED_AT = 50
"""Folders of each level that are looked into, at most."""


def beside(storage: Storage, folder: Location) -> str:
    """Returns advice for a place that is no folder: it is a file, or has neighbours with such a name."""
    around = storage.listing(folder.parent) if is_folder(storage, folder.parent) else {}
    if folder.name in around:
        of = f", of the checkpoint {folder.parent}" if MANIFEST in around else ""
        return f": that is a file{of}; give the folder of a checkpoint"
    near = get_close_matches(folder.name, [name for name in around if not name.startswith(".")], n=3)
    return f"; near it: {', '.join(near)}" if near else ""


def below(storage: Storage, folder: Location) -> str:
    """Returns advice for a folder that is no checkpoint: the checkpoints that it holds, as that of a series does."""
    found = sorted(_checkpoints(storage, folder, levels=2), key=lambda name: (len(name), name))
    if not found:
        return ""
    last = f"{len(found)} checkpoints: {', '.join(found[-3:])}" if len(found) > 1 else f"the checkpoint {found[0]}"
    return f". It holds {last}; give the folder of one, such as {folder}/{found[-1]}"


def _checkpoints(storage: Storage, folder: Location, *, levels: int) -> Iterator[str]:
    entries = storage.listing(folder).items()
    folders = [name for name, size in entries if size in (None, -1) and not name.startswith(".")]  # or links to them
    for name in sorted(folders, key=lambda name: (len(name), name))[-_LOOKED_AT:]:
        with suppress(FileNotFoundError, CheckpointError):
            if MANIFEST in storage.listing(folder / name):
                yield name
            elif levels > 1:
                yield from (f"{name}/{inner}" for inner in _checkpoints(storage, folder / name, levels=levels - 1))
