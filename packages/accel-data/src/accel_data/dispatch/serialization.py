"""Serialization of batches between live ranks: tensors beside a pickle of all other objects.

Pickles are sent only between processes of one running job and never stored.
"""

import io
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch

from accel_data.dispatch.buffers import Blocks

_ALIGNMENT = 64
_WORD = 8
FRONT = 4096
"""Bytes of the first send of a message, which includes the length of the rest."""
_LARGE = 128 << 10
"""Tensors of at least this many bytes are sent from their own memory, because a copy would cost as much as the send."""


@final
@dataclass(frozen=True, slots=True)
class SerializedBatch:
    """A message: ``body`` holds all but the ``large`` tensors, and their sizes. All are ``uint8`` tensors."""

    body: torch.Tensor
    large: tuple[torch.Tensor, ...]


def pack(content: Any, blocks: Blocks) -> SerializedBatch:
    """Serializes ``content`` into a block of ``blocks``; CPU tensors are not pickled, small ones are copied once."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(content)
    pickled = stream.getbuffer()
    table = struct.pack(f"<{2 + len(pickler.large)}q", len(pickled), len(pickler.large), *map(_size, pickler.large))
    position = _aligned(len(table) + len(pickled))
    places = []
    for tensor in pickler.small:
        places.append(position)
        position = _aligned(position + tensor.nbytes)
    block = blocks.take(position)
    head = memoryview(block).cast("B")
    head[: len(table)] = table
    head[len(table) : len(table) + len(pickled)] = pickled
    message = torch.frombuffer(block, dtype=torch.uint8)
    for tensor, place in zip(pickler.small, places, strict=True):
        if tensor.numel():
            message[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return SerializedBatch(message, tuple(tensor.view(-1).view(torch.uint8) for tensor in pickler.large))


@final
class Arriving:
    """A message whose body has arrived, and whose large tensors are still to be received.

    Attributes:
        room: memory for each of the large tensors, in the order in which they are sent.
    """

    def __init__(self, body: Any, blocks: Blocks) -> None:
        self._body = body
        length, count = struct.unpack_from("<2q", body)
        sizes = struct.unpack_from(f"<{count}q", body, 2 * _WORD)
        self._pickled = slice((2 + count) * _WORD, (2 + count) * _WORD + length)
        ends = list(accumulate(map(_aligned, sizes), initial=0))
        self._places = list(zip(ends, sizes, strict=False))
        self._tail = blocks.take(ends[-1]) if count else None
        whole = (
            torch.frombuffer(self._tail, dtype=torch.uint8)
            if count
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        self.room = [whole[place : place + size] for place, size in self._places]

    def content(self) -> Any:
        """Deserializes the message; its tensors are views of the received memory and keep it alive."""
        large = iter([(self._tail, place) for place, _ in self._places])
        with memoryview(self._body).cast("B") as view:
            return _Unpickler(view[self._pickled], _Found(self._body, _aligned(self._pickled.stop), large)).load()


@final
class _Pickler(pickle.Pickler):
    """Pickles all but plain CPU tensors, of which it stores dtype name, shape, and whether the tensor is large.

    Uses ``reducer_override`` rather than ``persistent_id``, which would be called for every number and string as well.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        # Other tensors (sparse, nested, quantized, subclasses, on a device) pickle themselves.
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.is_nested or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        is_large = obj.nbytes >= _LARGE and obj.is_contiguous()
        (self.large if is_large else self.small).append(obj.detach())
        return left_out, (str(obj.dtype).removeprefix("torch."), tuple(obj.shape), is_large)


def left_out(name: str, shape: tuple[int, ...], is_large: bool) -> torch.Tensor:
    """Stands in the pickle for a tensor that is sent beside it; ``_Unpickler`` replaces it by the tensor."""
    raise pickle.UnpicklingError(f"a message lacks its {name} tensor of shape {shape}: only a whole one can be read")


@final
class _Unpickler(pickle.Unpickler):
    """Unpickles a message; finds the tensors in the order in which the pickler left them out."""

    def __init__(self, pickled: memoryview, found: "_Found") -> None:
        super().__init__(io.BytesIO(pickled))
        # An object, because a method of this class would be kept in the unpickler's memo: a cycle that keeps all
        # tensors.
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        return self._found if (module, name) == (__name__, left_out.__name__) else super().find_class(module, name)


@final
class _Found:
    """Returns the tensors of a message one after the other: small ones from ``position`` on in its body."""

    def __init__(self, body: Any, position: int, large: Iterator[tuple[Any, int]]) -> None:
        self._body, self._position, self._large = body, position, large

    def __call__(self, name: str, shape: tuple[int, ...], is_large: bool) -> torch.Tensor:
        dtype = getattr(torch, name)
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block, place = next(self._large) if is_large else (self._body, self._position)
        tensor = torch.frombuffer(block, dtype=dtype, count=count, offset=place)
        if not is_large:
            self._position = _aligned(self._position + tensor.nbytes)
        return tensor.view(shape)


def split_body(body: torch.Tensor) -> list[torch.Tensor]:
    """Splits a body into its sends: a front of ``FRONT`` bytes with the body's length, and the rest, if there is any.

    Each send wakes threads on both sides; with the front, a short body needs only one.
    """
    front = torch.zeros(FRONT, dtype=torch.uint8, device="cpu")
    front[:_WORD].view(torch.int64).fill_(body.nbytes)
    first = body[: FRONT - _WORD]
    front[_WORD : _WORD + len(first)] = first
    rest = body[FRONT - _WORD :]
    return [front, rest] if len(rest) else [front]


def body_size(front: torch.Tensor) -> int:
    """Returns the length of the body that begins in ``front``."""
    return int(front[:_WORD].view(torch.int64))


def joined_body(front: torch.Tensor, block: Any) -> list[torch.Tensor]:
    """Copies the body's bytes in ``front`` into ``block``; returns views of the rest, which is yet to be received."""
    whole = torch.frombuffer(block, dtype=torch.uint8)[: body_size(front)]
    first = whole[: FRONT - _WORD]
    first.copy_(front[_WORD : _WORD + len(first)])
    rest = whole[FRONT - _WORD :]
    return [rest] if len(rest) else []


def _size(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
