"""Resharding of an iterable dataset: the rest of an epoch that another number of readers began, as one stream."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset

from accel_data.iterable.capabilities import choose_epoch
from accel_data.iterable.worker import WorkerView
from accel_data.order.iterators import continuing
from accel_data.private import worker_info
from accel_data.source import Json
from accel_state.errors import DataStateError


@final
@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far each stream of an epoch was read. Its field names are the keys of saved states.

    The dataset was cut into ``shards`` (1: not at all), and each of these divided itself among ``workers`` (1: it did
    not). ``taken`` counts the elements read of each, shard by shard and worker by worker; more than a stream holds
    means all of it. Readers took ``chunk`` elements of one stream at a time, the next time from worker ``turn``.
    ``samples`` had been delivered by then, over all ranks. ``seated``: the dataset read ``get_worker_info()`` (where
    several workers have divided it, it always has).
    """

    shards: int
    workers: int
    chunk: int
    taken: tuple[int, ...]
    turn: int
    samples: int
    seated: bool = False

    def record(self) -> dict[str, Json]:
        """JSON values: one number for each stream."""
        return {name: getattr(self, name) for name in self.__slots__} | {"taken": list(self.taken)}

    @classmethod
    def load(cls, record: Mapping[str, Json] | None) -> "ShardProgress | None":
        """The reverse of ``record``; None of None."""
        return None if record is None else cls(**{**record, "taken": tuple(record["taken"])})

    def is_cut_alike(self, shards: int, workers: int, divided: bool) -> bool:
        """Whether ``shards`` ranks with ``workers`` workers have the same streams."""
        return self.shards == shards and (not divided or self.workers == workers)

    def of_shard(self, index: int) -> tuple[int, ...]:
        """Elements taken of the streams of one shard, by worker."""
        return self.taken[index * self.workers : (index + 1) * self.workers]


@final
class MergedRemainder(IterableDataset[Any]):
    """What is left of all streams, as one stream, in the order in which its readers would have gone on.

    The dataset is cut again as it was, and while a stream is read ``get_worker_info()`` names the worker that read it
    before. What was read before is read again and dropped.
    """

    def __init__(self, dataset: Any, progress: ShardProgress) -> None:
        self.dataset, self.progress, self.epoch = dataset, progress, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of all streams."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        workers = self.progress.workers
        turns = ((self.progress.turn + number) % workers for number in range(workers))
        streams = deque(self._stream(shard, worker) for worker in turns for shard in range(self.progress.shards))
        while streams:
            stream = streams.popleft()
            chunk = next(stream, None)
            if chunk is not None:
                yield from chunk
                streams.append(stream)

    def _stream(self, shard: int, worker: int) -> Iterator[list[Any]]:
        """The rest of one stream, in chunks."""
        before, dataset = self.progress, self.dataset
        if before.shards > 1:
            dataset = dataset.shard(num_shards=before.shards, index=shard)
        info = worker_info(worker, before.workers, dataset)
        absent, hidden = WorkerView(info, dataset), not before.seated and before.workers == 1
        with absent.installed(hidden=hidden):
            choose_epoch(dataset, self.epoch)
            elements = continuing(iter(copy.copy(dataset) if isinstance(dataset, Iterator) else dataset))
            deque(islice(elements, before.of_shard(shard)[worker]), maxlen=0)
        while True:
            with absent.installed(hidden=hidden):
                chunk = list(islice(elements, before.chunk))
            if before.workers > 1 and not absent.asked:
                raise DataStateError(
                    f"the position is in streams that {before.workers} workers of each rank divided by their "
                    f"worker_init_fn, which {type(self.dataset).__name__} does not repeat: resume with as many ranks "
                    "and workers as then, or divide in the dataset's __iter__"
                )
            if not chunk:
                return
            yield chunk
