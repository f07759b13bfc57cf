"""Segments: weights that are read, held and dropped together."""

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accel_inference.prefetch.buffers import Buffer, BufferPool
from accel_inference.weights.sources import HostWeight, Source

_ALIGNMENT = 64
"""As torch aligns memory on the CPU; kernels may round otherwise if alignment differs."""


class SegmentState(enum.Enum):
    """Where the weights of a segment are."""

    ABSENT = "absent"
    QUEUED = "queued"
    READING = "reading"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Segment:
    """Weights of a block that no earlier block has; a weight that blocks share is in the first one's segment."""

    weights: Mapping[Hashable, Source]
    state: SegmentState = SegmentState.ABSENT
    holders: int = 0
    """Blocks with weights of the segment that compute now."""
    in_advance: bool = False
    """Whether it was queued by a prediction and has not been used since."""
    buffer: Buffer | None = None
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the segment's buffer."""
        return BufferPool.rounded(sum(_aligned(weight.nbytes) for weight in self.weights.values()))

    def read(self, device: torch.device) -> None:
        """Reads the weights into the buffer, and makes the tensors over it, or copies of them on an accelerator."""
        tensors: dict[Hashable, Tensor] = {}
        offset = 0
        # The modes of the thread that reads must not show in the weights.
        with torch.inference_mode(False), torch.no_grad():
            for key, weight in self.weights.items():
                tensors[key] = self._read_one(weight, offset).to(weight.dtype)
                offset += _aligned(weight.nbytes)
            if device.type != "cpu":
                tensors = copied(tensors, device)
        self.tensors = tensors

    def _read_one(self, weight: Source, offset: int) -> Tensor:
        if isinstance(weight, HostWeight):
            return weight.tensor
        assert self.buffer is not None
        with self.buffer.bytes_at(offset, weight.nbytes) as target:
            weight.file.read_into(target, weight.offset)
        return self.buffer.view(offset, weight.shape, weight.stored)


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Weights of a module by name: those in host memory, and those of segments."""

    direct: Mapping[str, Tensor]
    names: Mapping[str, tuple[Segment, Hashable]]

    @property
    def segments(self) -> list[Segment]:
        """The segments that hold the block's weights, each once."""
        return list({id(segment): segment for segment, _ in self.names.values()}.values())

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name; their segments must be resident."""
        return {**self.direct, **{name: segment.tensors[key] for name, (segment, key) in self.names.items()}}


def copied(tensors: Mapping[Hashable, Tensor], device: torch.device) -> dict[Hashable, Tensor]:
    """Copies on an accelerator; they are complete when this returns, and the device computes meanwhile."""
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    with module.stream(stream):
        made = {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
    stream.synchronize()
    return made


def new_block(sources: Mapping[str, Source], known: dict[Hashable, Segment], device: torch.device) -> WeightBlock:
    """The block of a module's weights; what ``known`` segments lack becomes one more segment, which is added there.

    Weights in host memory are used where they are if the block computes on the CPU.
    """
    on_host = device.type == "cpu"
    direct = {name: source.tensor for name, source in sources.items() if on_host and isinstance(source, HostWeight)}
    read = {name: source for name, source in sources.items() if name not in direct}
    added = {source.key: source for source in read.values() if source.key not in known}
    if added:
        known.update(dict.fromkeys(added, Segment(added)))
    return WeightBlock(direct, {name: (known[source.key], source.key) for name, source in read.items()})


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
