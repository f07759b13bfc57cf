"""Resharding of a checkpoint: a rewrite with another number of files, one part of a tensor at a time."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from typing import final

from accel_ckpt.format.blocks import BLOCK, Content, FileRecord
from accel_ckpt.format.manifest import Part, TensorEntry, pack, tensor_file
from accel_ckpt.format.safetensors_file import Item, file_order, header_of
from accel_ckpt.format.shard_layout import Box, chunk
from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io.storage import Location, Storage, locate, staged_at
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.saving.plan import SMALL
from accel_state.errors import CheckpointError


def reshard(
    path: str | os.PathLike[str], target: str | os.PathLike[str], files: int, *, overwrite: bool = False
) -> Checkpoint:
    """Writes the checkpoint at ``path`` to ``target`` with its tensors in ``files`` files. Not a collective.

    Large tensors are split along dim 0 as in FSDP, so that as many ranks read one file each; small tensors are stored
    in full in one of the files. Nothing else changes: any number of ranks reads the same values from either, rank-local
    states stay with their ranks, and files of hooks and the kind of digest stay. Memory holds one part of a tensor at a
    time; neither the model nor a process group is needed.

    Raises:
        CheckpointError: there is no such checkpoint, ``files`` is below 1, or ``target`` is taken or cannot be written.
        CheckpointCorruptError: a block does not match its digest; nothing appears at ``target``.
    """
    if files < 1:
        raise CheckpointError(f"files={files}; a checkpoint has 1 or more files of tensors")
    place = locate(target)
    with (
        open_checkpoint(path, verify=False) as saved,
        staged_at(place, overwrite=overwrite) as (storage, staged),
    ):
        records: dict[str, FileRecord] = {}
        digest = saved.manifest.digest
        extra = {name: _copy_extra(saved, name, storage, staged.folder) for name in saved.manifest.extra}
        staged.brought(digest)  # syncs the folders of these files
        for name in saved.documents:
            records[name] = storage.write(staged.folder / name, Content.of(saved.document_bytes(name), digest))
        shards = _spread(saved, files)
        for number, pieces in enumerate(shards):
            header = header_of([piece.item for piece in pieces], {"format": "pt"})
            size = len(header) + sum(piece.item.nbytes for piece in pieces)
            stream = partial(_stream, saved, header, pieces)
            # Digesting in other threads would keep parts in memory until they are digested.
            name = tensor_file(number)
            records[name] = storage.write(staged.folder / name, Content(stream, size, digest, threads=0))
        manifest = replace(
            saved.manifest,
            id=staged.id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            writer={**saved.manifest.writer, "resharded": saved.manifest.id},
            files=records,
            tensors=_entries(saved, shards),
            block_size=BLOCK,
            folder=staged.subfolder,
            extra=extra,
        )
        staged.seal(pack(manifest))
    return open_checkpoint(place, verify=False)


def _copy_extra(saved: Checkpoint, name: str, storage: Storage, folder: Location) -> FileRecord:
    """Copies a file of the user, one verified block at a time."""
    *above, last = name.split("/")
    for part in above:
        folder = folder / part
        storage.ready(folder)
    size, pieces = saved.manifest.extra[name].size, partial(saved.extra_pieces, name)
    return storage.write(folder / last, Content(lambda: map(memoryview, pieces()), size, saved.manifest.digest, 0))


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """Box of a tensor, and its entry in a file."""

    tensor: str
    box: Box
    item: Item


def _spread(saved: Checkpoint, files: int) -> list[list[_Piece]]:
    """Assigns the pieces of all tensors to files, in file order."""
    shards: list[list[_Piece]] = [[] for _ in range(files)]
    load = [0] * files
    for name, entry in saved.manifest.tensors.items():
        size = prod(entry.shape) * saved.dtype_of(name).itemsize
        if not size:
            continue
        cut = files > 1 and size > SMALL and entry.shape[0] >= files
        if not cut:
            number = load.index(min(load))
            load[number] += size
            whole = Box((0,) * len(entry.shape), entry.shape)
            shards[number].append(_Piece(name, whole, Item(name, entry.dtype, entry.shape)))
            continue
        for number in range(files):
            for start, stop in chunk([(0, entry.shape[0])], files, number):
                box = Box((start, *(0 for _ in entry.shape[1:])), (stop - start, *entry.shape[1:]))
                key = f"{name}@{','.join(map(str, box.offset))}"
                shards[number].append(_Piece(name, box, Item(key, entry.dtype, box.shape)))
    return [_in_order(pieces) for pieces in shards]


def _in_order(pieces: Sequence[_Piece]) -> list[_Piece]:
    of_key = {piece.item.key: piece for piece in pieces}
    return [of_key[item.key] for item in file_order([piece.item for piece in pieces])]


def _entries(saved: Checkpoint, shards: Sequence[Sequence[_Piece]]) -> dict[str, TensorEntry]:
    parts: dict[str, list[Part]] = {name: [] for name in saved.manifest.tensors}
    for number, pieces in enumerate(shards):
        for piece in pieces:
            parts[piece.tensor].append(Part(tensor_file(number), piece.item.key, piece.box))
    return {
        name: TensorEntry(entry.dtype, entry.shape, tuple(parts[name]))
        for name, entry in saved.manifest.tensors.items()
    }


def _stream(saved: Checkpoint, header: bytes, pieces: Sequence[_Piece]) -> Iterator[memoryview]:
    yield memoryview(header)
    for piece in pieces:
        yield byte_view(saved.read_box(piece.tensor, piece.box))
