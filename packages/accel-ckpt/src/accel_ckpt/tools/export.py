"""Export of a model as plain safetensors files with an index, the format of the Hugging Face Hub."""

import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from accel_ckpt.format.blocks import Content
from accel_ckpt.format.safetensors_file import Item, file_order, header_of
from accel_ckpt.format.tensors import (
    CODES,
    as_dtensor,
    byte_view,
    check_memory,
    dtype_name,
    host_copy,
    local_tensor,
    put_together,
)
from accel_ckpt.format.tree import TensorTable, leaves, show_path
from accel_ckpt.io.storage import Location, locate, storage_of
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.rank_group import RankGroup
from accel_ckpt.tools.hub_files import INDEX
from accel_state.errors import CheckpointError
from accel_state.pytree.composite import is_composite

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Yields the tensors of these names, one after the other, when they are written.
_Values = Callable[[Sequence[str]], Iterator[torch.Tensor]]


def export_model(
    state: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    *,
    name: str = "model",
    group: "ProcessGroup | None" = None,
) -> list[Location]:
    """Writes ``state`` to ``<name>.safetensors``, or to numbered shards and ``<name>.safetensors.index.json``.

    Collective: every rank of the group must call this. DTensors are all-gathered one at a time; rank 0 writes. Of tied
    tensors the first is written; the names of the others are in the file's metadata. The files are renamed to their
    names once all are complete, the index last; then shards of an earlier export are removed. ``directory`` is a folder
    or a URL. Returns the files.

    Raises:
        CheckpointError: on all ranks if a tensor has a dtype that safetensors lacks, or a write fails.
    """
    peers = RankGroup.of(group)
    folder = locate(directory)
    what = f"exporting to {folder}"

    def tied() -> dict[str, str]:
        kept, aliases = _without_ties(state)
        _arranged(kept, name, max_shard_size)  # refuses what no file holds, before any rank waits for another
        return aliases

    # A rank without elements of tied tensors does not see that they are tied.
    aliases = peers.run_on_all(what, tied)[0]
    kept = {key: tensor for key, tensor in state.items() if key not in aliases}
    files = _arranged(kept, name, max_shard_size)
    values = _Gathered(kept, [key for keys in files.values() for key in keys])

    def write() -> None:
        try:
            if peers.rank == 0:
                _write_all(folder, name, files, kept, aliases, values)
        finally:  # a rank that fails, or writes nothing, still takes part in the all-gathers
            values.finish()

    peers.run_on_all(what, write)
    return [folder / file for file in files]


def export_checkpoint(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    *,
    state: str = "model",
    name: str | None = None,
) -> list[Location]:
    """Writes the tensors of the saved ``state`` of the checkpoint at ``path``, like ``export_model``. Not a collective.

    Memory holds one tensor at a time; neither the model nor a process group is needed. Nested keys are joined by dots,
    and values that are not tensors are left out. The files are called ``name``, by default like the state.

    Raises:
        CheckpointError: there is no such checkpoint or state, or as in ``export_model``.
        CheckpointCorruptError: a block does not match its digest; no file appears in ``directory``.
    """
    folder, prefix = locate(directory), state if name is None else name
    with open_checkpoint(path, verify=False) as saved:
        stored = stored_names(saved, state)
        firsts = {source: key for key, source in reversed(stored.items())}
        aliases = {key: firsts[source] for key, source in stored.items() if firsts[source] != key}
        kept = {
            key: torch.empty(saved.manifest.tensors[source].shape, dtype=saved.dtype_of(source), device="meta")
            for key, source in stored.items()
            if key not in aliases
        }
        files = _arranged(kept, prefix, max_shard_size)
        _write_all(folder, prefix, files, kept, aliases, lambda keys: (saved.read_tensor(stored[key]) for key in keys))
        return [folder / file for file in files]


def export_tensors(tensors: Mapping[str, torch.Tensor], file: str | os.PathLike[str]) -> Location:
    """Writes full ``tensors`` to the one safetensors ``file``, atomically. Not a collective.

    Raises:
        CheckpointError: a value is not a tensor, is sharded (gather it first) or has a dtype that safetensors lacks,
            the file's name has another suffix, or the write fails.
    """
    path = locate(file)
    stem, dot, kind = path.name.rpartition(".")
    if (dot, kind) != (".", "safetensors"):
        raise CheckpointError(f"{path} would hold safetensors; call it {stem or path.name}.safetensors")
    kept, aliases = _without_ties(tensors)
    if sharded := [key for key, tensor in kept.items() if as_dtensor(tensor) is not None]:
        raise CheckpointError(f"{sharded[0]} is a DTensor; put it together on all ranks first: .full_tensor()")
    files = _arranged(kept, stem, sys.maxsize)
    _write_files(path.parent, files, kept, aliases, lambda keys: (kept[key] for key in keys))
    return path


def parse_size(size: int | str) -> int:
    """Parses ``"10GB"`` (10**10), ``"5GiB"`` (5 * 2**30), ``"300 KB"`` or a number to bytes.

    Raises:
        CheckpointError: ``size`` is none of these, or not positive.
    """
    match = _SIZE.fullmatch(str(size).strip())
    value = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
    if value < 1:
        raise CheckpointError(f"{size!r} is no size; expected a number of bytes or a text such as '10GB' or '500MiB'")
    return value


def split_into_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Groups names in order into shards of at most ``limit`` bytes; a larger tensor is a shard by itself."""
    shards: list[list[str]] = [[]]
    room = limit
    for key, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= size
    return shards


def shard_names(name: str, count: int) -> list[str]:
    """Returns ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [f"{name}.safetensors"]
    return [f"{name}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Placeholder in a tree for a tensor, with its name in the checkpoint."""

    key: str


def stored_names(saved: Checkpoint, state: str) -> dict[str, str]:
    """Maps the name under which each tensor of a state is exported to its name in the checkpoint."""
    found = leaves(saved.read_structure(state, _Stored))
    stored: dict[str, str] = {}
    places: dict[str, str] = {}
    for place, leaf in found.items():
        if not isinstance(leaf, _Stored):
            continue
        name = ".".join(map(str, place))
        if name in stored:
            raise CheckpointError(
                f"{show_path(place)} and {places[name]} of {state!r} would both be called {name!r}; export another "
                "state, or save it without such names"
            )
        stored[name], places[name] = leaf.key, show_path(place)
    if not stored:
        every = ", ".join(map(repr, saved.names))
        raise CheckpointError(f"{state!r} in {saved.path} holds no tensors; its states are {every}")
    if left_out := [show_path(place) for place, leaf in found.items() if not isinstance(leaf, _Stored)]:
        _LOG.info("not exported, because they are no tensors: %s", ", ".join(left_out))
    return stored


def _arranged(kept: Mapping[str, torch.Tensor], name: str, max_shard_size: int | str) -> dict[str, list[str]]:
    """Maps each file to the tensors in it, in file order."""
    for key, tensor in kept.items():
        if dtype_name(tensor.dtype) not in CODES:
            raise CheckpointError(f"{key} has dtype {tensor.dtype}, which safetensors files cannot hold")
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in kept.items()}
    shards = split_into_shards(sizes, parse_size(max_shard_size))
    return dict(zip(shard_names(name, len(shards)), (_file_keys(keys, kept) for keys in shards), strict=True))


def _write_all(
    folder: Location,
    name: str,
    shards: Mapping[str, Sequence[str]],
    kept: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    values: _Values,
) -> None:
    """Writes an export called ``name``, and removes leftover shards of an earlier export of that name."""
    index = {f"{name}.safetensors.{INDEX}": _index(shards, kept)} if len(shards) > 1 else {}
    _write_files(folder, shards, kept, aliases, values, index)
    storage = storage_of(folder)
    ours = re.compile(re.escape(name) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    entries = storage.listing(folder).items()
    earlier = [entry for entry, size in entries if size is not None and ours.fullmatch(entry)]
    for entry in sorted(earlier, key=lambda entry: not entry.endswith(INDEX)):  # the index before the shards in it
        if entry not in shards and entry not in index:
            storage.remove(folder / entry)


def _write_files(
    folder: Location,
    files: Mapping[str, Sequence[str]],
    kept: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    values: _Values,
    documents: Mapping[str, bytes] | None = None,
) -> None:
    """Writes files of tensors, then ``documents``, under temporary names, and renames them once all are complete."""
    storage, mark = storage_of(folder), secrets.token_hex(4)
    storage.ready(folder)
    written: dict[Location, Location] = {}

    def write(name: str, content: Content) -> None:
        temporary = folder / f".{name}.{mark}.tmp"
        written[temporary] = folder / name
        storage.write(temporary, content)

    try:
        for name, keys in files.items():
            items = [Item(key, dtype_name(kept[key].dtype), tuple(kept[key].shape)) for key in keys]
            header = header_of(
                items, {"format": "pt", **{key: first for key, first in aliases.items() if first in keys}}
            )
            size = len(header) + sum(item.nbytes for item in items)
            # Digesting in other threads would keep tensors in memory until they are digested.
            write(name, Content(partial(_pieces, header, keys, values), size, threads=0))
        for name, document in (documents or {}).items():
            write(name, Content.of(document))
        if documents and any(name in files for name in storage.names(folder)):
            # New files under the names of old ones: an index of them would be one of both, if this ended here.
            for name in documents:
                storage.remove(folder / name)
        storage.publish(written)
    finally:
        for temporary in written:
            storage.remove(temporary)


def _pieces(header: bytes, keys: Sequence[str], values: _Values) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in values(keys):
        yield byte_view(host_copy(tensor))


@final
class _Gathered:
    """Yields tensors in an order common to all ranks; a DTensor is all-gathered when it is reached, once only."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Sequence[str]) -> None:
        self._tensors = tensors
        self._left = iter([key for key in order if as_dtensor(tensors[key]) is not None])

    def __call__(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        for key in keys:
            dtensor = as_dtensor(self._tensors[key])
            if dtensor is None:
                yield self._tensors[key]
            elif next(self._left, None) == key:
                yield put_together(dtensor)
            else:
                raise CheckpointError(
                    f"{key} is sharded, and was put together before a request failed that would have to be made again; "
                    "export again, or save a checkpoint and export that (accel ckpt export)"
                )

    def finish(self) -> None:
        """Takes part in the all-gathers of the remaining tensors."""
        for key in self._left:
            put_together(as_dtensor(self._tensors[key]))


def _index(shards: Mapping[str, Sequence[str]], kept: Mapping[str, torch.Tensor]) -> bytes:
    total = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    where = {key: file for file, keys in shards.items() for key in keys}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _without_ties(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    table = TensorTable()
    firsts: dict[str, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{key} is a {type(tensor).__qualname__}; an export holds tensors only")
        kind = type(tensor)
        if is_composite(tensor):
            raise CheckpointError(
                f"{key} is a {kind.__module__}.{kind.__qualname__}, a tensor made of others, which a safetensors file "
                "does not hold; nearest: save_state, or an export of the other tensors alone"
            )
        if tensor.device.type == "meta":
            raise CheckpointError(f"{key} is on the meta device and has no values to export; materialise it first")
        check_memory(key, local_tensor(tensor))
        stored = table.add((key,), tensor)
        if stored in firsts:
            aliases[key] = firsts[stored]
        else:
            firsts[stored] = key
            kept[key] = tensor
    if aliases:
        _LOG.info("tied tensors are exported once: %s", ", ".join(f"{k} is {first}" for k, first in aliases.items()))
    return kept, aliases


def _file_keys(keys: Sequence[str], kept: Mapping[str, torch.Tensor]) -> list[str]:
    return [item.key for item in file_order([Item(key, dtype_name(kept[key].dtype), ()) for key in keys])]
