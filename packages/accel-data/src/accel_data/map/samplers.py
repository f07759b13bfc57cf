"""Samplers for a DataLoader: of an order, seeded by epoch, sharded by batches, or skipping batches."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from accel_data.map.index_stream import sized
from accel_data.map.sampler_stream import BatchSamplerStream, DrawnRows, last_batch_size, rounds_of
from accel_data.map.sharding import check_split
from accel_data.order.cursor import Cursor
from accel_data.order.orders import Order
from accel_state.parallelism.config import DataShard


@final
class OrderSampler(Sampler[int]):
    """An order as a sampler: ``DataLoader(dataset, sampler=OrderSampler(LengthGrouped(lengths, group_size=32)))``.

    A prepared loader uses the order itself, so that it resumes and shards without iteration. Elsewhere the sampler
    yields the indices of epoch ``epoch``, which increases by one after each full pass.
    """

    def __init__(self, order: Order, *, seed: int = 0) -> None:
        self.order, self.seed, self.epoch = order, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices = self.order(self.seed, self.epoch)
        for positions in torch.arange(len(self.order), device="cpu").split(16384):
            yield from indices.take(positions).tolist()
        self.epoch += 1

    def __len__(self) -> int:
        return len(self.order)


class SeedableRandomSampler(RandomSampler):
    """A ``RandomSampler`` whose order depends on ``data_seed`` + ``epoch`` only.

    ``data_seed`` defaults to torch's initial seed. ``epoch`` starts at 0 and increases by one after each full pass.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1


@final
class BatchSamplerShard(BatchSampler):
    """One rank's batches of a batch sampler that every rank iterates over.

    Without ``split_batches`` rank ``r`` gets batches r, r + W, r + 2W, ...; with ``even_batches`` too, an incomplete
    last round is padded with the first indices. With ``split_batches`` every batch is split into W equal slices. The
    batches of a batch sampler without ``batch_size`` are passed on in full.

    Raises:
        ConfigError: ``split_batches`` without a batch size, or with one that W does not divide.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the batch sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches of all ranks."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch`` of the batch sampler and of its sampler, if they have it."""
        for target in (self.batch_sampler, self.sampler):
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        from contextlib import nullcontext

        stream = BatchSamplerStream(
            self.batch_sampler,
            self._cut,
            start=Cursor(),
            shard=DataShard(self.process_index, self.num_processes),
            size=None,
            rng=nullcontext(),
            ahead=0,
        )
        return stream.batches()

    def __len__(self) -> int:
        last = last_batch_size(self.batch_sampler)
        return rounds_of(len(self.batch_sampler), self._cut, self.process_index, last=last)

    @property
    def _cut(self) -> DrawnRows:
        return DrawnRows(self.num_processes, self.batch_size, self.split_batches, self.even_batches, self.drop_last)


@final
class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first ``skip_batches`` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def batch_size(self) -> Any:  # type: ignore[override]
        """Batch size of the wrapped batch sampler."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> Any:  # type: ignore[override]
        """``drop_last`` of the wrapped batch sampler."""
        return getattr(self.batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Sampler of the wrapped batch sampler."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Sequence[Any]]:  # type: ignore[override]
        from itertools import islice

        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        batches = sized(self.batch_sampler)
        if batches is None:
            raise TypeError(f"{type(self.batch_sampler).__name__} has no length")
        return max(batches - self.skip_batches, 0)


def get_sampler(dataloader: Any) -> Any:
    """Returns the sampler of single indices of a loader, or None if the loader has only a batch sampler."""
    sampler = getattr(dataloader, "sampler", None)
    if isinstance(sampler, BatchSampler):
        return getattr(sampler, "sampler", None)
    return getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
