"""Mapped checkpoint files: weights that are pages of a file, without a copy.

A mapping is private and writable: what a process writes to a weight becomes a page of its own, and the file stays as it
is. Pages are read when they are used first, and the operating system drops and reads again those that nobody wrote to.
"""

import mmap
import os
from collections.abc import Hashable
from typing import TypeGuard

import torch
from torch import Tensor

from accel_inference.weights.sources import FileWeight, HostWeight, Weight, WeightFile
from accel_state.errors import CheckpointCorruptError, CheckpointError

SMALL = 2**14
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
        if not isinstance(source, FileWeight) or not _is_worth_mapping(source):
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


def may_be_mapped(weight: Weight) -> TypeGuard[FileWeight]:
    """Whether ``mapped_offloaded`` serves a weight: one of an offload folder, unless a copy costs less."""
    return isinstance(weight, FileWeight) and weight.is_offloaded and _is_worth_mapping(weight)


def mapped_offloaded(weight: FileWeight) -> Tensor:
    """A weight of an offload folder as the pages of its file, all of which are in memory when this returns.

    No copy is made, so that a weight in the page cache costs the entries of a page table. The pages belong to the
    tensor and leave the process with it.

    Raises:
        CheckpointCorruptError: the file has been replaced, written or cut since it was listed.
        CheckpointError: the operating system refuses the mapping.
    """
    with weight.file.opened() as descriptor:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        try:
            # torch maps without a descriptor of its own, of which a process has a thousand.
            flat = torch.from_file(
                str(weight.file.path), shared=False, size=weight.elements, dtype=weight.stored, device="cpu"
            )
        except RuntimeError as error:
            raise CheckpointError(f"{weight.file.path} cannot be mapped into memory: {error}") from error
    if WeightFile.at(weight.file.path) != weight.file:
        raise CheckpointCorruptError(f"{weight.file.path} was replaced while it was mapped; load it again")
    flat.view(torch.uint8)[:: mmap.PAGESIZE].amax()
    return flat.view(weight.shape)


def _is_worth_mapping(weight: FileWeight) -> bool:
    return weight.dtype == weight.stored and weight.nbytes >= SMALL
