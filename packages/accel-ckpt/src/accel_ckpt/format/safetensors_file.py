"""Headers of safetensors files: writing and parsing, with every number validated before it is used.

Specification: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}`` padded with
spaces, then the tensors row-major without gaps. A dtype that safetensors lacks is stored as bytes (``U8``) with one
more dimension; the manifest has the real dtype.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from accel_ckpt.format.tensors import BYTES, CODES, dtype_of
from accel_state.errors import CheckpointCorruptError, CheckpointError

# Limit of the safetensors library.
MAX_HEADER = 100_000_000
# Alignment of the first tensor, so that tensors can be mapped and written in full vectors.
_ALIGN = 64
_LENGTH = 8
_METADATA = "__metadata__"
_SIZES = {code: int(dtype.itemsize) for name, code in CODES.items() if (dtype := dtype_of(name)) is not None}
# dtype codes of other writers, with their size in bytes.
_SIZES |= {"C64": 8, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Item:
    """Tensor of a file: its key, the name of its torch dtype, and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Span:
    """Location of a tensor: bytes from the start of the file, and dtype code and shape from the header."""

    begin: int
    end: int
    code: str
    shape: tuple[int, ...]


def itemsize(dtype: str) -> int:
    """Returns the size of one element in bytes."""
    known = dtype_of(dtype)
    if known is None:
        raise CheckpointCorruptError(f"unknown dtype {dtype!r}")
    return int(known.itemsize)


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns the safetensors dtype code and shape for a tensor."""
    if dtype in CODES:
        return CODES[dtype], tuple(shape)
    return BYTES, (*shape, itemsize(dtype))


def file_order(items: Sequence[Item]) -> list[Item]:
    """Sorts tensors by falling element size, so that each one is aligned to its element."""
    return sorted(items, key=lambda item: (-itemsize(item.dtype), item.key))


def header_of(items: Sequence[Item], metadata: dict[str, str]) -> bytes:
    """Builds the header of a file with ``items`` in this order, up to the first tensor."""
    document: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    if any(item.key == _METADATA for item in items):
        raise CheckpointError(f"a tensor cannot be called {_METADATA!r}, which safetensors keeps for itself; rename it")
    position = 0
    for item in items:
        code, shape = stored_as(item.dtype, item.shape)
        document[item.key] = {"dtype": code, "shape": list(shape), "data_offsets": [position, position + item.nbytes]}
        position += item.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"{len(items)} tensors with keys as long as {max(items, key=lambda item: len(item.key)).key!r:.100} need a "
            f"header of {len(text)} bytes; a safetensors file holds {MAX_HEADER}: shorten the keys"
        )
    return len(text).to_bytes(_LENGTH, "little") + text


def read_header(read: Callable[[int, int], bytes], size: int, name: str) -> dict[str, Span]:
    """Parses the header of a file of ``size`` bytes, which ``read(begin, end)`` reads from.

    Raises:
        CheckpointCorruptError: names ``name`` and the invalid value; raised before any memory for tensors is allocated.
    """
    if size < _LENGTH:
        raise CheckpointCorruptError(f"{name}: {size} bytes are no safetensors file")
    length = int.from_bytes(read(0, _LENGTH), "little")
    if length > min(MAX_HEADER, size - _LENGTH):
        raise CheckpointCorruptError(f"{name}: a header of {length} bytes does not fit into {size}")
    try:
        document = json.loads(read(_LENGTH, _LENGTH + length), object_pairs_hook=_no_duplicates)
        if not isinstance(document, dict):
            raise ValueError("the header is no object")
        base = _LENGTH + length
        entries = {key: entry for key, entry in document.items() if key != _METADATA}
        return {key: _span(entry, base, size) for key, entry in entries.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorruptError(f"{name}: ill-formed safetensors header: {error}") from error


def _span(entry: dict[str, Any], base: int, size: int) -> Span:
    code, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *shape]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or len(shape) > 64:
        raise ValueError(f"offsets and shape must be natural numbers, not {numbers!r:.100}")
    if begin > end or base + end > size:
        raise ValueError(f"bytes {begin} to {end} lie outside of the file's {size}")
    if code not in _SIZES:
        raise ValueError(f"unknown dtype {code!r}")
    if prod(shape) * _SIZES[code] != end - begin:
        raise ValueError(f"{code} of shape {shape} is not {end - begin} bytes")
    return Span(base + begin, base + end, code, tuple(shape))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
