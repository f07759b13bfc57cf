"""Sources of weights: host memory, ranges of files, and readers of other formats."""

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from accel_state.device.huge_pages import new_tensor
from accel_state.errors import CheckpointCorruptError
from accel_state.pytree.composite import is_composite


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file as it was when its contents were listed.

    Each read opens the file, so that a model with thousands of files needs one descriptor, and refuses a file that has
    been replaced, written or cut since: its bytes are another model's.
    """

    path: Path
    identity: tuple[int, int, int, int]

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "WeightFile":
        """The file at ``path`` as it is now; the error of the operating system if there is none."""
        place = Path(path).absolute()
        return cls(place, _identity(place.stat()))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.identity[2]

    @property
    def is_written(self) -> bool:
        """Whether the file was written or cut since; False for one that another file replaced, or that was removed."""
        try:
            found = _identity(self.path.stat())
        except OSError:
            return False
        return found[:2] == self.identity[:2] and found != self.identity

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills ``target`` with the bytes at ``offset``.

        Raises:
            CheckpointCorruptError: the file is not the same any more, or ends before.
        """
        with self.opened() as descriptor:
            done = 0
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], offset + done)
                if count == 0:
                    raise CheckpointCorruptError(
                        f"{self.path} ends at byte {offset + done}, and a weight ends at {offset + len(target)}"
                    )
                done += count

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the file, for reading.

        Raises:
            CheckpointCorruptError: the file is not the same any more.
        """
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            if _identity(os.fstat(descriptor)) != self.identity:
                raise CheckpointCorruptError(
                    f"{self.path} was replaced or written to since its header was read; load it again"
                )
            yield descriptor
        finally:
            os.close(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class FileWeight:
    """A tensor in a file, with the bytes that it has in memory: used in ``dtype``, and ``stored`` in another."""

    file: WeightFile
    offset: int
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype
    name: str = ""
    """The tensor's name in the file, if the format has one."""
    is_offloaded: bool = False
    """Whether the file is one of an offload folder: it holds this tensor alone, and is replaced and never written."""

    @property
    def key(self) -> Hashable:
        """Equal for two names of the same tensor."""
        return self.file.identity[:2], self.offset, self.shape, self.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.elements * self.stored.itemsize

    def read(self, buffer: Tensor | None = None) -> Tensor:
        """The tensor in new host memory, or at the begin of ``buffer`` (uint8) unless it is used in another dtype."""
        # numpy-free and without the modes of the caller: a weight is neither meta nor of inference mode.
        with torch.inference_mode(False), torch.device("cpu"):
            raw = new_tensor((self.nbytes,), torch.uint8) if buffer is None else buffer[: self.nbytes]
            if self.nbytes:
                self.file.read_into(raw.numpy().data, self.offset)
            return raw.view(self.stored).reshape(self.shape).to(self.dtype)

    def in_dtype(self, dtype: torch.dtype) -> "FileWeight":
        """The weight as it is used in another dtype."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A tensor in host memory."""

    tensor: Tensor

    @property
    def key(self) -> Hashable:
        """Equal for names of one tensor."""
        one = self.tensor
        has_address = one.numel() > 0 and not is_composite(one)
        return (one.data_ptr(), one.dtype, one.shape, one.stride()) if has_address else id(one)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.tensor.dtype

    def read(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def in_dtype(self, dtype: torch.dtype) -> "HostWeight":
        """The weight in another dtype, converted now."""
        return self if self.dtype == dtype else HostWeight(self.tensor.to(dtype))


@dataclass(frozen=True, slots=True)
class FormatWeight:
    """A tensor that a reader of another format returns in ``stored``, and that is used in ``dtype``."""

    reader: Callable[[], Tensor]
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the format's files."""
        return torch.Size(self.shape).numel() * self.stored.itemsize

    def read(self) -> Tensor:
        """The tensor in new host memory."""
        return self.reader().to(self.dtype)

    def in_dtype(self, dtype: torch.dtype) -> "FormatWeight":
        """The weight as it is used in another dtype."""
        return replace(self, dtype=dtype)


Source = FileWeight | HostWeight


class Weight(Protocol):
    """A weight of a checkpoint: what a source has."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    def read(self) -> Tensor: ...
    def in_dtype(self, dtype: torch.dtype) -> "Weight": ...
