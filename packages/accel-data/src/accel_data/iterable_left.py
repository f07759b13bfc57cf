"""Streams that a dataset cut for one number of readers, read on by any other number."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from accel_data.iterable import forward_epoch, reseed_generator
from accel_data.source import Json
from accel_state.errors import DataStateError

LEFT_KEY = "left"


@final
@dataclass(frozen=True, slots=True)
class Left:
    """How far each of the streams of an epoch was read.

    The dataset was cut into ``shards`` (1: not at all), and each of these divided itself among ``workers`` (1: it did
    not). ``taken`` counts the elements read of each, shard by shard and worker by worker; more than a stream holds
    means all of it. Readers took ``chunk`` elements of one stream at a time, the next time from worker ``turn``.
    ``samples`` had been delivered by then, over all ranks. ``seated``: the dataset asked which worker reads it (where
    several workers have divided it, it always has).
    """

    shards: int
    workers: int
    chunk: int
    taken: tuple[int, ...]
    turn: int
    samples: int
    seated: bool = False

    def state_dict(self) -> dict[str, Json]:
        """JSON values: one number for each stream."""
        return {name: getattr(self, name) for name in self.__slots__} | {"taken": list(self.taken)}

    @classmethod
    def from_record(cls, record: Mapping[str, Json]) -> "Left | None":
        """What a saved record says, if it knows."""
        said = record.get(LEFT_KEY)
        return None if said is None else cls(**{**said, "taken": tuple(said["taken"])})

    def of_shard(self, index: int) -> tuple[int, ...]:
        """Elements taken of the streams of one shard, by worker."""
        return self.taken[index * self.workers : (index + 1) * self.workers]


@final
class LeftStreams(IterableDataset[Any]):
    """What was left of all streams, as one stream, in the order in which its readers would have gone on.

    Anybody can read it who has the dataset: it is cut again as it was, and for each stream whoever asks is told to be
    the worker that read it then. What was read before is read again and forgotten.
    """

    def __init__(self, dataset: Any, left: Left) -> None:
        self.dataset, self.left, self.epoch = dataset, left, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of all streams."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        left = self.left
        seats = [
            ((left.turn + number) % left.workers, shard)
            for number in range(left.workers)
            for shard in range(left.shards)
        ]
        streams = deque(self._stream(shard, worker) for worker, shard in seats)
        while streams:
            stream = streams.popleft()
            chunk = next(stream, None)
            if chunk is not None:
                yield from chunk
                streams.append(stream)

    def _stream(self, shard: int, worker: int) -> Iterator[list[Any]]:
        """The rest of one stream, in chunks."""
        left = self.left
        dataset = self.dataset.shard(num_shards=left.shards, index=shard) if left.shards > 1 else self.dataset
        seat = _Seat(worker, left.workers, dataset, shown=left.seated or left.workers > 1)
        with seat.taken():
            forward_epoch(dataset, self.epoch)
            reseed_generator(dataset, self.epoch)
            elements = iter(dataset)
            deque(islice(elements, left.taken[shard * left.workers + worker]), maxlen=0)
        while True:
            with seat.taken():
                chunk = list(islice(elements, left.chunk))
            self._check(seat)
            if not chunk:
                return
            yield chunk

    def _check(self, seat: "_Seat") -> None:
        if self.left.workers > 1 and not seat.asked:
            raise DataStateError(
                f"the position is in streams that {self.left.workers} workers of each rank divided by their "
                f"worker_init_fn, which {type(self.dataset).__name__} knows nothing of: resume with as many ranks and "
                "workers as then, or divide in the dataset's __iter__"
            )


@final
class _Seat:
    """A worker's place that somebody else sits in while he reads in its stead."""

    seed = 0

    def __init__(self, number: int, count: int, dataset: Any, *, shown: bool) -> None:
        self._number, self._count, self.dataset, self._shown = number, count, dataset, shown
        self.asked = False

    @property
    def id(self) -> int:
        """The worker's number."""
        self.asked = True
        return self._number

    @property
    def num_workers(self) -> int:
        """How many workers there were."""
        self.asked = True
        return self._count

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, torch tells whoever asks that this is the worker; where none was asked for, that there is none."""
        before = torch_worker._worker_info
        torch_worker._worker_info = self if self._shown else None  # type: ignore[assignment]
        try:
            yield
        finally:
            torch_worker._worker_info = before
