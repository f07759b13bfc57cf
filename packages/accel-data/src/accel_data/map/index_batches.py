"""Index batches of one rank, as the sampler of the user's DataLoader, and their form for its workers.

An index batch sent to a worker carries a seed for the worker's global generators. Random augmentation in a worker is
therefore a function of the batch's position, whatever the worker has read before: a resumed run draws the same numbers
as an uninterrupted one, with any number of workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, final

from torch.utils.data import BatchSampler, get_worker_info

from accel_data.map.dataloader_parts import DataLoaderParts
from accel_data.map.global_rng import seed_globals
from accel_data.map.index_stream import IndexStream
from accel_data.options import LoaderOptions
from accel_data.order.counter_rng import derive_key
from accel_state.errors import DataError
from accel_state.parallelism.config import DataShard

_END = object()


@final
@dataclass(frozen=True, slots=True)
class WorkerSeeds:
    """Seeds of the workers' global generators in one pass.

    Attributes:
        base: determines, with the position of a batch, the seed for reading that batch.
        epoch: epoch that the first batch of each worker sets on the worker's dataset; None: the datasets have it
            already.
        workers: number of workers; they take the first batches of a pass in turn.
    """

    base: int
    epoch: int | None
    workers: int

    def sent(self, indices: Any, number: int, position: int) -> "SentIndices":
        """Wraps batch ``number`` (from 0) of the pass, which begins at ``position`` of the epoch."""
        return SentIndices(indices, self.base, position, self.epoch if number < self.workers else None)


@final
class SentIndices:
    """Index batch for a worker, which unpickles it to plain indices; in this process, a sequence of the indices."""

    __slots__ = ("_content", "_indices")

    def __init__(self, indices: Any, base: int, position: int, epoch: int | None) -> None:
        self._indices, self._content = indices, (indices, base, position, epoch)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return self._indices[place]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, self._content


def _arrived(indices: Any, base: int, position: int, epoch: int | None) -> Any:
    """Seeds the worker that received ``indices``; torch unpickles a batch of indices right before reading it."""
    info = get_worker_info()
    if info is not None:
        seed_globals(derive_key(base, position))
        if epoch is not None and callable(set_epoch := getattr(info.dataset, "set_epoch", None)):
            set_epoch(epoch)
    return indices


@final
class IndexBatches(BatchSampler):
    """This rank's index batches of one pass after another, instead of the user's sampler.

    The user's own samplers are the attributes ``batch_sampler`` and ``sampler``.

    Attributes:
        index_stream: index stream of the pass in progress.
        seeds: seeds of the pass; None: batches are read in this process, with its own generators.
        is_read: whether the DataLoader has begun to iterate over the index batches of the pass.
        looks_ahead: whether one index batch is drawn ahead, so that ``exhausted`` is known.
        exhausted: with ``looks_ahead``, whether the index batch taken last is the last of the pass.
        length: number of index batches in an epoch, if known.
    """

    def __init__(
        self, reading: DataLoaderParts, shard: DataShard, *, batch_size: int | None, options: LoaderOptions
    ) -> None:
        self.sampler, self.batch_sampler = reading.sampler, reading.batch_sampler
        self.batch_size = batch_size  # type: ignore[assignment]
        self.drop_last = reading.drop_last
        self.num_processes, self.process_index = shard.count, shard.index
        self.split_batches = options.split_batches
        self.batched = reading.batched
        self.index_stream: IndexStream | None = None
        self.seeds: WorkerSeeds | None = None
        self.is_read = self.looks_ahead = self.exhausted = False
        self.length: int | None = None

    @property
    def set_epoch(self) -> Callable[[int], None]:
        """``set_epoch`` of the user's batch sampler, or of its sampler; ``AttributeError`` if neither has one."""
        for sampler in (self.batch_sampler, self.sampler):
            found: Callable[[int], None] | None = getattr(sampler, "set_epoch", None)
            if callable(found):
                return found
        raise AttributeError("neither the batch sampler of the loader nor its sampler has a set_epoch")

    def __iter__(self) -> Iterator[Any]:
        if self.index_stream is None:
            raise DataError("the sampler of a prepared loader has no position of its own: iterate the loader")
        self.is_read = True
        batches: Iterator[Any] = self.index_stream.batches()
        if self.seeds is not None:
            return self._sent(batches, self.index_stream, self.seeds)
        if not self.batched:
            batches = (index for batch in batches for index in batch)
        self.exhausted = False
        return self._looking_ahead(batches) if self.looks_ahead else batches

    def _sent(self, batches: Iterator[list[Any]], stream: IndexStream, seeds: WorkerSeeds) -> Iterator[SentIndices]:
        numbers = count()
        for batch in batches:
            for indices in (batch,) if self.batched else batch:
                number = next(numbers)
                yield seeds.sent(indices, number, stream.position(number))

    def _looking_ahead(self, items: Iterator[Any]) -> Iterator[Any]:
        current = next(items, _END)
        while current is not _END:
            following = next(items, _END)
            self.exhausted = following is _END
            yield current
            current = following

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the number of batches is unknown: the user's sampler has no length")
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "index_stream": None}
