"""A model as plain safetensors files with an index, as the tools of the Hub read them, and back."""

import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel_ckpt.blocks import run_jobs
from accel_ckpt.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.container import Item, file_order, header_of
from accel_ckpt.files import FileSource, write_file
from accel_ckpt.peers import Peers
from accel_ckpt.plain_files import INDEX, dtype_of_code, model_files, read_plain
from accel_ckpt.staging import sync_folder
from accel_ckpt.tensors import CODES, as_dtensor, byte_view, dtype_name, host_copy
from accel_ckpt.tree import TensorTable, leaves, show_path
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_READ_JOB = 32 * 2**20


def export_model(
    state: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    *,
    name: str = "model",
    group: "ProcessGroup | None" = None,
) -> list[Path]:
    """Writes ``state`` to ``<name>.safetensors``, or to numbered shards and ``<name>.safetensors.index.json``.

    Of tensors that share memory the first is written; the names of the others are in the file's metadata. DTensors are
    put together one at a time, so all ranks of ``group`` must call; rank 0 writes. Files appear under their names when
    all are complete, the index last; then shards of an earlier export are removed. Returns the files.

    Raises:
        CheckpointError: on all ranks if a tensor has a dtype that safetensors has not, or the disk refuses.
    """
    peers = Peers.of(group)
    folder = Path(directory).absolute()
    kept, aliases = _without_ties(state)
    files = _arranged(kept, name, max_shard_size)
    values = (_whole(kept[key]) for keys in files.values() for key in keys)

    def write() -> None:
        try:
            if peers.rank == 0:
                _write_all(folder, name, files, kept, aliases, values)
        finally:  # a rank that fails, or writes nothing, still takes part in putting tensors together
            for _ in values:
                pass

    peers.together(f"exporting to {folder}", write)
    return [folder / file for file in files]


def export_checkpoint(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    *,
    state: str = "model",
    name: str | None = None,
) -> list[Path]:
    """Writes the tensors of the saved ``state`` of the checkpoint at ``path`` as ``export_model`` does.

    Memory holds one tensor at a time; neither the model nor a process group is needed. Parts of a nested name are
    joined by dots, and what is no tensor is left out. Files are called ``name``, or like the state. Not a collective.

    Raises:
        CheckpointError: there is no such checkpoint or state, or as ``export_model``.
        CheckpointCorruptError: what was read is not what was written; nothing appears in ``directory``.
    """
    folder, prefix = Path(directory).absolute(), state if name is None else name
    with open_checkpoint(path, verify=False) as saved:
        stored = _stored_names(saved, state)
        firsts = {source: key for key, source in reversed(stored.items())}
        aliases = {key: firsts[source] for key, source in stored.items() if firsts[source] != key}
        kept = {
            key: torch.empty(saved.manifest.tensors[source].shape, dtype=saved.dtype_of(source), device="meta")
            for key, source in stored.items()
            if key not in aliases
        }
        files = _arranged(kept, prefix, max_shard_size)
        values = (saved.read_tensor(stored[key]) for keys in files.values() for key in keys)
        _write_all(folder, prefix, files, kept, aliases, values)
        return [folder / file for file in files]


def export_tensors(tensors: Mapping[str, torch.Tensor], file: str | os.PathLike[str]) -> Path:
    """Writes whole ``tensors`` to the one safetensors ``file``, which is whole or as before. Not a collective.

    Raises:
        CheckpointError: a value is no tensor, sharded (gather it first) or of a dtype that safetensors has not, the
            file's name says another format, or the disk refuses.
    """
    path = Path(file).expanduser().absolute()
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} would hold safetensors; call it {path.with_suffix('.safetensors').name}")
    kept, aliases = _without_ties(tensors)
    if sharded := [key for key, tensor in kept.items() if as_dtensor(tensor) is not None]:
        raise CheckpointError(f"{sharded[0]} is a DTensor; put it together on all ranks first: .full_tensor()")
    (keys,) = _arranged(kept, path.stem, sys.maxsize).values()
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    _make_folder(path.parent)
    try:
        _write_tensors(temporary, keys, kept, aliases, (kept[key] for key in keys))
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_model_files(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, an index, or a folder with either, on the CPU; tied names come back tied.

    Raises:
        CheckpointError: there is none, or only files of formats that may run code when read.
        CheckpointCorruptError: a file is not what its header or the index says.
    """
    files = model_files(Path(path).expanduser())
    loaded: dict[str, torch.Tensor] = {}
    jobs: list[Callable[[], None]] = []
    aliases: dict[str, str] = {}
    with ExitStack() as opened:
        for file in files:
            source = opened.enter_context(closing(FileSource(file.resolve())))
            spans, metadata = read_plain(source)
            for key, span in spans.items():
                loaded[key] = torch.empty(span.shape, dtype=dtype_of_code(span.code, key))
                jobs += _read_jobs(source, byte_view(loaded[key]), span.begin)
            aliases |= {key: first for key, first in metadata.items() if key != "format"}
        run_jobs(jobs)
    tied = {key: loaded[first] for key, first in aliases.items() if key not in loaded and first in loaded}
    return loaded | tied


def parse_size(size: int | str) -> int:
    """Bytes in ``"10GB"`` (10**10), ``"5GiB"`` (5 * 2**30), ``"300 KB"`` or a number.

    Raises:
        CheckpointError: it is none of these, or not positive.
    """
    match = _SIZE.fullmatch(str(size).strip())
    value = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
    if value < 1:
        raise CheckpointError(f"{size!r} is no size; expected a number of bytes or a text such as '10GB' or '500MiB'")
    return value


def split_into_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, a new shard whenever the next would exceed ``limit`` bytes; larger ones stand alone."""
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
    """``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [f"{name}.safetensors"]
    return [f"{name}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stands in a tree for a tensor by its name in the checkpoint."""

    key: str


def _stored_names(saved: Checkpoint, state: str) -> dict[str, str]:
    """The tensors of a state: the name to export each under, and its name in the checkpoint."""
    found = leaves(saved.read_structure(state, _Stored))
    stored = {".".join(map(str, place)): leaf.key for place, leaf in found.items() if isinstance(leaf, _Stored)}
    if not stored:
        every = ", ".join(map(repr, saved.names))
        raise CheckpointError(f"{state!r} in {saved.path} holds no tensors; its states are {every}")
    if left_out := [show_path(place) for place, leaf in found.items() if not isinstance(leaf, _Stored)]:
        _LOG.info("not exported, because they are no tensors: %s", ", ".join(left_out))
    return stored


def _arranged(kept: Mapping[str, torch.Tensor], name: str, max_shard_size: int | str) -> dict[str, list[str]]:
    """The files to write and the tensors of each, in the order in which they lie there."""
    for key, tensor in kept.items():
        if dtype_name(tensor.dtype) not in CODES:
            raise CheckpointError(f"{key} has dtype {tensor.dtype}, which safetensors files cannot hold")
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in kept.items()}
    shards = split_into_shards(sizes, parse_size(max_shard_size))
    return dict(zip(shard_names(name, len(shards)), (_file_keys(keys, kept) for keys in shards), strict=True))


def _write_all(
    folder: Path,
    name: str,
    shards: Mapping[str, Sequence[str]],
    kept: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    values: Iterator[torch.Tensor],
) -> None:
    _make_folder(folder)
    mark = secrets.token_hex(4)
    written: dict[Path, Path] = {}
    try:
        for file, keys in shards.items():
            temporary = folder / f".{file}.{mark}.tmp"
            written[temporary] = folder / file
            _write_tensors(temporary, keys, kept, aliases, values)
        if len(shards) > 1:
            temporary = folder / f".{name}.{mark}.tmp"
            written[temporary] = folder / f"{name}.safetensors.{INDEX}"
            write_file(temporary, [memoryview(_index(shards, kept))])
        for temporary, final in written.items():
            os.replace(temporary, final)
        _remove_stale(folder, name, {final.name for final in written.values()})
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error


def _write_tensors(
    path: Path,
    keys: Sequence[str],
    kept: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    values: Iterator[torch.Tensor],
) -> None:
    """Writes one file; ``values`` gives its tensors in the order of ``keys``, each when its turn comes."""
    items = [Item(key, dtype_name(kept[key].dtype), tuple(kept[key].shape)) for key in keys]
    tied = {key: first for key, first in aliases.items() if first in keys}
    pieces = (byte_view(host_copy(next(values))) for _ in items)
    header = memoryview(header_of(items, {"format": "pt", **tied}))
    # Threads for digests would keep tensors in memory until their turn comes.
    write_file(path, (piece for part in ([header], pieces) for piece in part), threads=0)


def _index(shards: Mapping[str, Sequence[str]], kept: Mapping[str, torch.Tensor]) -> bytes:
    total = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    where = {key: file for file, keys in shards.items() for key in keys}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _remove_stale(folder: Path, name: str, fresh: set[str]) -> None:
    ours = re.compile(re.escape(name) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for entry in list(folder.iterdir()):
        if ours.fullmatch(entry.name) and entry.name not in fresh:
            entry.unlink()


def _without_ties(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    table = TensorTable()
    firsts: dict[str, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{key} is a {type(tensor).__qualname__}; an export holds tensors only")
        if tensor.device.type == "meta":
            raise CheckpointError(f"{key} is on the meta device and has no values to export; materialise it first")
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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor
    whole: torch.Tensor = dtensor.full_tensor()
    return whole


def _read_jobs(source: FileSource, view: memoryview, begin: int) -> Iterator[Callable[[], None]]:
    for at in range(0, len(view), _READ_JOB):
        yield lambda at=at: source.read_into(view[at : at + _READ_JOB], begin + at)  # type: ignore[misc]
