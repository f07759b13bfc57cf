"""Any batch as one block of bytes between live ranks: tensors beside a pickle of everything else.

Pickles travel only between processes of one running job; nothing of this is ever stored.
"""

import io
import pickle
from typing import Any, final

import torch

from accel_data.dispatch_memory import Blocks

_ALIGNMENT = 64
_HEADER = 8


def pack(content: Any, blocks: Blocks) -> torch.Tensor:
    """``content`` as a ``uint8`` tensor in a block of ``blocks``, each plain CPU tensor copied once and not pickled."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(content)
    pickled = stream.getbuffer()
    position = _aligned(_HEADER + len(pickled))
    places = []
    for tensor in pickler.tensors:
        places.append(position)
        position = _aligned(position + tensor.nbytes)
    block = blocks.take(position)
    head = memoryview(block).cast("B")
    head[:_HEADER] = len(pickled).to_bytes(_HEADER, "little")
    head[_HEADER : _HEADER + len(pickled)] = pickled
    message = torch.frombuffer(block, dtype=torch.uint8)
    for tensor, place in zip(pickler.tensors, places, strict=True):
        if tensor.numel():
            message[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return message


def unpack(block: Any) -> Any:
    """The content of a buffer; its tensors are views of it, so nothing is copied and it lives as long as they do."""
    with memoryview(block).cast("B") as view:
        length = int.from_bytes(view[:_HEADER], "little")
        return _Unpickler(block, view[_HEADER : _HEADER + length]).load()


@final
class _Pickler(pickle.Pickler):
    """Leaves tensors out and notes what is needed to find them: dtype by name, and shape."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[str, tuple[int, ...]] | None:
        # Other tensors (sparse, nested, quantized, subclasses, on a device) know best how to pickle themselves.
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return None
        if obj.is_nested or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        self.tensors.append(obj.detach())
        return str(obj.dtype).removeprefix("torch."), tuple(obj.shape)


@final
class _Unpickler(pickle.Unpickler):
    """Meets the tensors in the order in which they were left out."""

    def __init__(self, block: Any, pickled: memoryview) -> None:
        super().__init__(io.BytesIO(pickled))
        self._block, self._position = block, _aligned(_HEADER + len(pickled))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, shape = pid
        dtype = getattr(torch, name)
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._block, dtype=dtype, count=count, offset=self._position)
        self._position = _aligned(self._position + tensor.nbytes)
        return tensor.view(shape)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
