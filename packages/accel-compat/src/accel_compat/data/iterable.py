"""Iterable datasets: this process's samples."""

import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset


class CompatIterableShard(IterableDataset[Any]):
    """This process's samples of an iterable dataset that every process iterates in full."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes != 0:
            raise ValueError(
                f"To use `IterableDatasetShard` in `split_batches` mode, the batch size ({batch_size}) needs to be a "
                f"round multiple of the number of processes ({num_processes})."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, also of the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _sizes(self) -> tuple[int, int]:
        """Samples of a group over all processes, and those of this process."""
        group = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        return group, self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        group, part = self._sizes()
        total = len(self.dataset)
        return (total // group if self.drop_last else math.ceil(total / group)) * part

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        group, part = self._sizes()
        mine = slice(self.process_index * part, (self.process_index + 1) * part)
        samples = iter(self.dataset)
        first: list[Any] = []
        while held := list(islice(samples, group)):
            if len(held) < group:
                if self.drop_last:
                    return
                held += islice(cycle(first or list(held)), group - len(held))
            first = first or held
            yield from held[mine]
