"""Mapped checkpoint files: weights that are pages of a file, without a copy.

A mapping is private and writable: what a process writes to a weight becomes a page of its own, and the file stays as it
is. Pages are read when they are used first, and the operating system drops and reads again those that nobody wrote to.
"""

import mmap
from collections.abc import Hashable

import torch

from accel_inference.weights.sources import FileWeight, HostWeight, Weight, WeightFile
from accel_state.errors import CheckpointError

_SMALL = 2**14
"""Bytes below which a copy costs less than the faults of the pages."""


class MappedFiles:
    """Files that are mapped once each, for as long as this object or a weight of the file is alive.

    A file that is replaced by a rename stays mapped as it was; one that is cut or overwritten in place must not be used
    any more: its weights change, and reading a page beyond its end ends the process (SIGBUS).
    """

    def __init__(self) -> None:
        self._files: dict[WeightFile, mmap.mmap] = {}
        self._mapped: set[Hashable] = set()

    def weight(self, source: Weight) -> Weight:
        """The weight as pages of its file; others as they are.

        Weights of other formats are not mapped here, nor those that are used in another dtype, nor weights of less than
        16 KiB, nor those that their file does not align to their elements. A second name of one tensor is read, so that
        the two do not share memory.

        Raises:
            CheckpointCorruptError: the file has been replaced, written or cut since its header was read.
            CheckpointError: the operating system refuses the mapping.
        """
        if not isinstance(source, FileWeight) or source.nbytes < _SMALL or source.dtype != source.stored:
            return source
        if source.offset % source.stored.itemsize:
            return source
        if source.key in self._mapped:
            return source
        self._mapped.add(source.key)
        memory = self._memory(source.file)
        with torch.inference_mode(False), torch.device("cpu"):
            flat = torch.frombuffer(memory, dtype=source.stored, count=source.elements, offset=source.offset)
            return HostWeight(flat.view(source.shape))

    def _memory(self, file: WeightFile) -> mmap.mmap:
        if file not in self._files:
            with file.opened() as descriptor:
                try:
                    self._files[file] = mmap.mmap(descriptor, file.size, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{file.path} cannot be mapped into memory: {error}") from error
        return self._files[file]
