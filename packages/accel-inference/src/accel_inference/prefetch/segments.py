"""Segments: weights that are read, held and dropped together."""

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accel_inference.prefetch.buffers import AnyBuffer, BufferPool, PinnedBuffer
from accel_inference.weights.mapped_files import mapped_offloaded, may_be_mapped
from accel_inference.weights.sources import FileWeight, HostWeight, Source
from accel_state.errors import CheckpointCorruptError
from accel_state.pytree.composite import is_composite

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
    """Those that are read into the buffer."""
    mapped: Mapping[Hashable, FileWeight] = field(default_factory=dict)
    """Those that are pages of their files."""
    state: SegmentState = SegmentState.ABSENT
    holders: int = 0
    """Blocks with weights of the segment that compute now."""
    in_advance: bool = False
    """Whether it was queued by a prediction and has not been used since."""
    buffer: AnyBuffer | None = None
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    buffer_bytes: int = field(init=False)
    """Bytes of the buffer; 0 if all weights are mapped, and there is none."""
    nbytes: int = field(init=False)
    """Bytes of memory that the segment takes."""

    def __post_init__(self) -> None:
        read = sum(_aligned(weight.nbytes) for weight in self.weights.values())
        self.buffer_bytes = BufferPool.rounded(read) if self.weights else 0
        self.nbytes = self.buffer_bytes + sum(weight.nbytes for weight in self.mapped.values())

    def read(self, stream: torch.Stream | None) -> None:
        """Maps or reads the weights and makes the tensors over them, or with a ``stream`` copies on its device."""
        offset = 0
        # The modes of the thread that reads must not show in the weights.
        with torch.inference_mode(False), torch.no_grad():
            tensors = {key: mapped_offloaded(weight) for key, weight in self.mapped.items()}
            for key, weight in self.weights.items():
                tensors[key] = self._read_one(weight, offset).to(weight.dtype)
                offset += _aligned(weight.nbytes)
            if stream is not None:
                tensors = copied(tensors, stream)
        self.tensors = tensors

    def check(self) -> None:
        """Checks that the pages of resident weights are those that were mapped.

        Raises:
            CheckpointCorruptError: a file has been written or cut since.
        """
        for weight in self.mapped.values():
            if weight.file.is_written:
                raise CheckpointCorruptError(f"{weight.file.path} was written to while its weight was in use")

    def _read_one(self, weight: Source, offset: int) -> Tensor:
        assert self.buffer is not None
        if isinstance(weight, HostWeight):
            tensor = weight.tensor
            is_plain = not is_composite(tensor) and tensor.is_contiguous()  # a copy has the same strides
            if not is_plain or tensor.is_pinned() or not isinstance(self.buffer, PinnedBuffer):
                return tensor
            return self.buffer.view(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
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


def copied(tensors: Mapping[Hashable, Tensor], stream: torch.Stream) -> dict[Hashable, Tensor]:
    """Copies on the device of ``stream``; they are complete when this returns, and the device computes meanwhile."""
    with torch.get_device_module(stream.device).stream(stream):
        made = {key: tensor.to(stream.device, non_blocking=True) for key, tensor in tensors.items()}
    stream.synchronize()
    return made


def new_block(sources: Mapping[str, Source], known: dict[Hashable, Segment], device: torch.device) -> WeightBlock:
    """The block of a module's weights; what ``known`` segments lack becomes one more segment, which is added there.

    Weights in host memory are used where they are if the block computes on the CPU.
    """
    on_host = device.type == "cpu"
    direct = {name: source.tensor for name, source in sources.items() if on_host and isinstance(source, HostWeight)}
    read = {name: source for name, source in sources.items() if name not in direct}
    added: dict[Hashable, Source] = {source.key: source for source in read.values() if source.key not in known}
    if added:
        mapped = {key: source for key, source in added.items() if on_host and may_be_mapped(source)}
        segment = Segment({key: source for key, source in added.items() if key not in mapped}, mapped)
        known.update(dict.fromkeys(added, segment))
    return WeightBlock(direct, {name: (known[source.key], source.key) for name, source in read.items()})


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
