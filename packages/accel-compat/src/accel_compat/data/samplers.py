"""Batch samplers with Accelerate's batches: shards of each process, and passes without their first batches."""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler


class CompatBatchShard(BatchSampler):
    """This process's batches of a batch sampler.

    Without ``split_batches`` process ``r`` of ``n`` gets the batches ``r``, ``r + n``, ...; with it, every batch is
    divided into ``n`` parts. With ``even_batches`` the last batches are filled up with the first samples, so that all
    processes have equally many batches of equal size.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size = getattr(batch_sampler, "batch_size", None)
        if split_batches and (size is None or size % num_processes != 0):
            raise ValueError(
                f"To use `BatchSamplerShard` in `split_batches` mode, the batch size ({size}) needs to be a round "
                f"multiple of the number of processes ({num_processes})."
            )
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = size
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches or total % self.num_processes == 0:
            return total if self.split_batches else total // self.num_processes
        length = total // self.num_processes
        if self.drop_last:
            return length
        return length + 1 if self.even_batches or self.process_index < total % self.num_processes else length

    def __iter__(self) -> Iterator[Any]:
        return self._parts() if self.split_batches else self._turns()

    def _parts(self) -> Iterator[Any]:
        part = self.batch_size // self.num_processes
        mine = slice(part * self.process_index, part * (self.process_index + 1))
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[mine]
            elif not self.drop_last and self.even_batches:
                yield list(islice(cycle([*batch, *first]), self.batch_size))[mine]
            elif not self.drop_last and batch[mine]:
                yield batch[mine]

    def _turns(self) -> Iterator[Any]:
        pending: list[Any] = []
        first: list[Any] = []
        early: list[Any] = []
        for count, batch in enumerate(self.batch_sampler):
            if count < self.num_processes and not self.drop_last:
                first += batch
                early.append(batch)
            if len(pending) == self.num_processes:  # its last batch is short, as at the end of a bucket
                yield pending[self.process_index]
                pending = []
            pending.append(batch)
            if len(pending) == self.num_processes and self._is_full(batch):
                yield pending[self.process_index]
                pending = []
        if self.drop_last or not pending:
            return
        if not self.even_batches:
            if self.process_index < len(pending):
                yield pending[self.process_index]
            return
        if self.batch_size is None:
            yield list(islice(cycle([*pending, *early]), self.num_processes))[self.process_index]
            return
        yield self._filled(pending, first)

    def _is_full(self, batch: Any) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _filled(self, pending: list[Any], first: list[Any]) -> list[Any]:
        """This process's batch of the last group, filled up with the first samples, which the processes take in turn."""
        fillers = cycle(first)
        for index in range(self.process_index + 1):
            held = pending[index] if index < len(pending) else []
            made = [*held, *islice(fillers, max(0, self.batch_size - len(held)))]
        return made


class CompatSkipSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches, with those that are skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


def nested_samplers(dataloader: Any) -> list[Any]:
    """The batch samplers and samplers of a loader, with those that shards, skips and wrappers have inside."""
    found: list[Any] = []
    waiting = [dataloader.batch_sampler, dataloader.sampler]
    while waiting:
        one = waiting.pop(0)
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
    return found


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Replaces the sampler of single samples of a loader, also inside of a shard of batches."""
    if isinstance(dataloader.sampler, BatchSampler):
        dataloader.sampler.sampler = sampler
        return
    dataloader.batch_sampler.sampler = sampler
    if hasattr(dataloader.batch_sampler, "batch_sampler"):
        dataloader.batch_sampler.batch_sampler.sampler = sampler
