"""Manifest: the sealed table of contents of a checkpoint. A folder without a manifest is not a checkpoint."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from accel_ckpt.format.blocks import BLOCK, DIGESTS, Digest, FileRecord, UnavailableError, sha256
from accel_ckpt.format.shard_layout import Box, overlap
from accel_ckpt.format.tensors import CODES, RAW
from accel_ckpt.format.tree import Json
from accel_state.errors import CheckpointCorruptError, CheckpointError

MANIFEST, TREE, FORMAT, VERSION = "manifest.json", "tree.json", "accel-checkpoint", 1
# The file ends with ,"seal":"<64 hex digits>"}\n, where the digits are the SHA-256 of all bytes before the comma.
_SEAL_BEGIN, _SEAL_END = b',"seal":"', b'"}\n'
_SEAL_LENGTH = len(_SEAL_BEGIN) + 64 + len(_SEAL_END)
# Bytes of the manifest, and of each other JSON file.
MAX_DOCUMENT = 2**31
MAX_SHAPE = 2**63
# Even with the widest dtype the number of bytes then fits into 63 bits.
MAX_ELEMENTS = 2**58
# Marker object in the subfolder of a save behind a URL. It reserves the target, and a target that cannot be written
# fails at the start of the save.
BEGUN = "begun"
_SUBFOLDER = re.compile(r"[0-9a-f]{16}")
_OWN_NAME = re.compile(r"tensors-\d{5,}\.safetensors|local-\d{5,}\.json")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class Part:
    """Box of a tensor, with the file and key under which it is stored."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Tensor of the checkpoint: name of its torch dtype, its full shape, and its parts, which do not overlap."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint: files with digests, tensors with parts, and versions of the writer."""

    id: str
    created: str
    world_size: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorEntry]
    metadata: Json = field(default_factory=dict)
    writer: Json = field(default_factory=dict)
    digest: Digest = "crc32"
    block_size: int = BLOCK
    version: int = VERSION
    folder: str = ""
    """Subfolder of the files; empty: the files are beside the manifest."""
    extra: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files that hooks of the user wrote, by path in the checkpoint."""

    def place_of(self, file: str) -> str:
        """Returns the path of a file relative to the manifest."""
        return f"{self.folder}/{file}" if self.folder else file

    @property
    def every_file(self) -> Mapping[str, FileRecord]:
        """All files except the manifest."""
        return {**self.files, **self.extra}

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes, without the manifest."""
        return sum(record.size for record in self.every_file.values())


def local_file(rank: int) -> str:
    """Returns the name of the JSON file with the rank-local trees of ``rank``."""
    return f"local-{rank:05d}.json"


def tensor_file(rank: int) -> str:
    """Returns the name of the file with the tensors that ``rank`` wrote."""
    return f"tensors-{rank:05d}.safetensors"


def is_subfolder(name: str) -> bool:
    """Whether ``name`` can be the subfolder of a save, which is its id."""
    return _SUBFOLDER.fullmatch(name) is not None


def pack(manifest: Manifest) -> bytes:
    """Serializes the manifest, with its seal.

    Raises:
        CheckpointError: it is longer than a reader accepts.
    """
    document = {
        "format": FORMAT,
        "version": manifest.version,
        "id": manifest.id,
        "created": manifest.created,
        "writer": manifest.writer,
        "world_size": manifest.world_size,
        "digest": manifest.digest,
        "block_size": manifest.block_size,
        **({"folder": manifest.folder} if manifest.folder else {}),
        "metadata": manifest.metadata,
        "files": _listed(manifest.files),
        **({"extra": _listed(manifest.extra)} if manifest.extra else {}),
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "parts": [[part.file, part.key, list(part.box.offset), list(part.box.shape)] for part in entry.parts],
            }
            for name, entry in manifest.tensors.items()
        },
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return check_length(text + _SEAL_BEGIN + sha256([text]).encode() + _SEAL_END, MANIFEST)


def check_length(document: bytes, name: str) -> bytes:
    """Returns a JSON file that is to be written, unless it is longer than a reader accepts."""
    if len(document) > MAX_DOCUMENT:
        raise CheckpointError(
            f"{name}: {len(document)} bytes of JSON, and a reader takes {MAX_DOCUMENT}; put long lists of numbers into "
            "tensors"
        )
    return document


def _listed(files: Mapping[str, FileRecord]) -> dict[str, Json]:
    return {name: {"size": record.size, "blocks": list(record.blocks)} for name, record in files.items()}


def unpack(content: bytes) -> Manifest:
    """Parses a manifest; verifies its seal and validates every name and number.

    Raises:
        CheckpointCorruptError: the manifest was altered or truncated, or contains invalid values.
        UnavailableError: a newer version of this package wrote it.
    """
    try:
        text = _unsealed(content)
        document = json.loads(text)
        return _manifest(document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorruptError(f"{MANIFEST}: ill-formed: {type(error).__name__}: {error}") from error


def seal_of(content: bytes) -> str:
    """Returns the 64 digits of the seal, which identify the full content of a checkpoint."""
    return content[-len(_SEAL_END) - 64 : -len(_SEAL_END)].decode("ascii", "replace")


def _unsealed(content: bytes) -> bytes:
    text, tail = content[:-_SEAL_LENGTH], content[-_SEAL_LENGTH:]
    if not tail.startswith(_SEAL_BEGIN) or not tail.endswith(_SEAL_END):
        raise CheckpointCorruptError(f"{MANIFEST}: not sealed, so it was cut off or altered")
    if sha256([text]) != seal_of(content):
        raise CheckpointCorruptError(f"{MANIFEST}: its content is not what was sealed")
    return text + b"}"


def _manifest(document: Any) -> Manifest:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r}, expected {FORMAT!r}")
    version = _natural(document["version"])
    if version > VERSION:
        raise UnavailableError(
            f"written in format version {version} by {document.get('writer')}; this accel-ckpt reads up to "
            f"version {VERSION}: install a newer one"
        )
    block = _natural(document["block_size"])
    if not 0 < block <= 2**32:
        raise ValueError(f"block_size {block}")
    digest = document["digest"]
    if digest not in DIGESTS:
        raise ValueError(f"unknown digest {digest!r}")
    folder = document.get("folder", "")
    if folder and not is_subfolder(folder):
        raise ValueError(f"{folder!r:.100} is no name of a subfolder")
    files = {_file_name(name): _record(name, entry, block) for name, entry in document["files"].items()}
    return Manifest(
        id=str(document["id"]),
        created=str(document["created"]),
        world_size=_natural(document["world_size"]),
        files=files,
        tensors=_tensors(document["tensors"], files),
        metadata=document["metadata"],
        writer=document["writer"],
        digest=digest,
        block_size=block,
        version=version,
        folder=folder,
        extra={_extra_name(name): _record(name, entry, block) for name, entry in document.get("extra", {}).items()},
    )


def _file_name(name: str) -> str:
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r} is no name of a file of a checkpoint")
    return name


def is_own_name(name: str) -> bool:
    """Whether ``name`` is reserved for a checkpoint's own files in its folder."""
    return name in (MANIFEST, TREE) or _OWN_NAME.fullmatch(name) is not None or is_subfolder(name) or name == BEGUN


def _extra_name(name: str) -> str:
    parts = name.split("/")
    if not all(parts) or {".", ".."} & {*parts} or "\0" in name or is_own_name(parts[0]):
        raise ValueError(f"{name!r:.100} is no path of a file in a checkpoint")
    return name


def _record(name: str, entry: Any, block: int) -> FileRecord:
    record = FileRecord(_natural(entry["size"]), tuple(entry["blocks"]))
    if len(record.blocks) != -(-record.size // block):
        raise ValueError(f"{name}: {len(record.blocks)} digests for {record.size} bytes")
    return record


def _tensors(entries: Mapping[str, Any], files: Mapping[str, FileRecord]) -> dict[str, TensorEntry]:
    """Validates all tensors; equal shapes that are saved in equal boxes are validated once and share their boxes."""
    known: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        dtype, shape, parts = entry["dtype"], entry["shape"], entry["parts"]
        if dtype not in CODES and dtype not in RAW:
            raise ValueError(f"{name}: unknown dtype {dtype!r}")
        text = repr((shape, [part[2:] for part in parts]))  # unlike the numbers, the text of 1, 1.0 and true differs
        if text not in known:
            known[text] = _geometry(name, shape, parts)
        sizes, boxes = known[text]
        if unlisted := [part[0] for part in parts if part[0] not in files]:
            raise ValueError(f"{name}: is said to be in {unlisted[0]!r:.100}, which is not listed")
        placed = [Part(part[0], str(part[1]), box) for part, box in zip(parts, boxes, strict=True)]
        found[name] = TensorEntry(dtype, sizes, tuple(placed))
    return found


def _geometry(name: str, shape: Any, parts: Any) -> tuple[tuple[int, ...], list[Box]]:
    """Returns a tensor's shape and the boxes of its parts, which must fill it without overlaps."""
    sizes = _naturals(shape)
    elements = prod(sizes)
    if len(sizes) > 64 or (elements or prod(max(size, 1) for size in sizes)) > MAX_ELEMENTS:
        raise ValueError(f"{name}: shape {sizes!r:.100}")
    boxes: list[Box] = []
    for _, _, offset, lengths in parts:
        box = Box(_naturals(offset), _naturals(lengths))
        fits = len(box.offset) == len(box.shape) == len(sizes)
        if not fits or any([a + n > size for a, n, size in zip(box.offset, box.shape, sizes, strict=True)]):
            raise ValueError(f"{name}: part at {box.offset} of {box.shape} lies outside of {sizes}")
        boxes.append(box)
    if sum(box.volume for box in boxes) != elements:
        raise ValueError(f"{name}: its parts do not make up the shape {sizes}")
    if len(boxes) > 1 and overlap(boxes):
        raise ValueError(f"{name}: its parts overlap")
    return sizes, boxes


def _naturals(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    for value in found:
        if type(value) is not int or not 0 <= value < MAX_SHAPE:
            _natural(value)
    return found


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_SHAPE:
        raise ValueError(f"{value!r:.100} is not a natural number below 2**63")
    return value
