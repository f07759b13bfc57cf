"""The side of an iterable dataset that runs where it is read: in the process of a loader's worker, or in the rank's."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data.iterable import Part, Stride, forward_epoch, parts, reseed_generator
from accel_data.iterable_traits import is_seekable
from accel_state.errors import DataError, DataStateError

_SNAPSHOT_SHARE = 0.05
"""Taking snapshots of a dataset's state may cost this share of the time; between them positions are counted."""


class Snapshot(NamedTuple):
    """What the dataset itself needs to go on behind element ``at`` of the stream of its reader."""

    at: int
    state: Any


class Delivered(NamedTuple):
    """One collated batch and what the rank has to know about it.

    A named tuple, so that workers' queues and torch's pinning thread take it apart like any batch.
    """

    batch: Any
    part: tuple[int, int, int]
    """``real``, ``group_real`` and ``stop`` of its ``Part``."""
    worker: int
    splits_itself: bool
    """The dataset asked which worker reads it, so each worker's stream is one of its own: a part of the rank's."""
    snapshot: Snapshot | None


@final
@dataclass(frozen=True, slots=True)
class Start:
    """Where the readers of one epoch begin; valid for that epoch only, later ones begin at the front.

    ``positions`` counts elements of the stream: one entry when all workers read the same stream, one for each worker
    when the dataset splits itself. ``turn`` is the worker whose batch comes next then.
    """

    epoch: int = 0
    positions: tuple[int, ...] = (0,)
    snapshots: tuple[Snapshot | None, ...] = (None,)
    turn: int = 0
    whole: bool = False
    """The position was counted in an undivided stream: a dataset that divides itself must not now."""
    base: int = 0
    """Elements that were counted before the first one the dataset now gives."""


@final
class StreamReader(IterableDataset[Delivered]):
    """Reads a user's dataset for one rank and yields whole collated batches.

    It takes the place of the dataset in the user's loader, whose own batching is switched off; ``collate`` is the
    user's. Batches leave the workers together with the position behind them, so a position never counts what a worker
    has read ahead.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        stride: Stride,
        collate: Callable[[Any], Any],
        *,
        batched: bool,
        shared: bool,
        whole: bool = False,
        every: int | None = None,
    ) -> None:
        """``batched``: the loader makes batches of samples. ``shared``: workers outlive an epoch (persistent).

        ``whole``: hide from the dataset that workers read it, so that it never divides itself. ``every``: batches after
        which a reader notes the dataset's own state (None: as often as is cheap).
        """
        self.dataset, self.stride, self.collate, self.batched = dataset, stride, collate, batched
        self.whole, self.every = whole, every
        self.start = Start()
        self.witness: _Witness | None = None
        # Living workers hold a copy of this object: the number of the epoch reaches them through shared memory.
        self._epoch = torch.zeros((), dtype=torch.int64)
        if shared:
            self._epoch.share_memory_()

    def begin(self, start: Start) -> None:
        """Chooses the epoch and the position at which the next iteration begins."""
        self.start = start
        self._epoch.fill_(start.epoch)
        forward_epoch(self.dataset, start.epoch)

    def __iter__(self) -> Iterator[Delivered]:
        epoch = int(self._epoch)
        start = self.start if self.start.epoch == epoch else Start(epoch)
        info = get_worker_info() or self.witness
        reseed_generator(self.dataset, epoch)
        if info is None:
            return self._deliver(start, 0, 1, None)
        witness = _Witness.of(info, start)
        forward_epoch(self.dataset, epoch)
        return self._deliver(start, witness.number, witness.count, witness)

    def _deliver(self, start: Start, worker: int, workers: int, witness: "_Witness | None") -> Iterator[Delivered]:
        hidden = witness is not None and (start.whole or self.whole)
        if witness is not None:
            witness.hide(hidden)
        position = _of_worker(start.positions, worker, 0)
        snapshot = _of_worker(start.snapshots, worker, None)
        in_dataset = is_seekable(self.dataset)
        if snapshot is not None and in_dataset:
            self.dataset.load_state_dict(snapshot.state)  # type: ignore[attr-defined]
        iterator = iter(self.dataset)
        stream: Any = self.dataset if in_dataset else iterator
        if snapshot is not None and not is_seekable(stream):
            snapshot = None  # of an earlier version of the dataset: the position tells how far to read instead
        elif snapshot is not None and not in_dataset:
            stream.load_state_dict(snapshot.state)
        # A generator only runs when it is asked: the first element tells whether the dataset looked at its worker.
        first = list(islice(iterator, 1))
        # One that goes on from a state of a divided stream need not look again.
        divided = snapshot is not None and not start.whole
        # One worker that is asked for counts, too: the order of the stream may depend on there being one.
        splits = witness is not None and (witness.asked or divided)
        stride = self.stride if splits else replace(self.stride, worker=worker, workers=workers)
        begun = snapshot.at if snapshot is not None else start.base
        camera = _Camera(stream, self.every)
        for part in parts(chain(first, iterator), stride, skip=position - begun):
            self._check(witness, splits)
            stop = begun + part.stop
            # A stream that has ended may already stand at its beginning again.
            snapshot = camera.take(stop) if part.group_real == stride.group_size else None
            facts = part.real, part.group_real, stop
            yield Delivered(self._collated(part, witness), facts, worker, splits, snapshot)
        self._check(witness, splits)

    def _check(self, witness: "_Witness | None", splits: bool) -> None:
        if witness is not None and not splits and witness.asked and witness.count > 1:
            raise DataError(
                f"{type(self.dataset).__name__} asked which worker reads it only after its first element, when the "
                "stream was already divided; ask at the beginning of __iter__"
            )

    def _collated(self, part: Part, witness: "_Witness | None") -> Any:
        content = part.elements if self.batched else part.elements[0]
        if witness is None:
            return self.collate(content)
        with witness.aside():
            return self.collate(content)


@final
class WorkerInit:
    """The user's ``worker_init_fn``, shown the user's dataset instead of the reader that took its place.

    Splitting ``get_worker_info().dataset`` there is the other documented way to divide a dataset over workers.
    """

    def __init__(self, init: Callable[[int], None] | None, reader: StreamReader) -> None:
        self.init, self.reader = init, reader

    def __call__(self, worker: int) -> None:
        reader = self.reader
        witness = _Witness(get_worker_info(), reader.dataset)
        witness.turned(reader.start)
        # Kept by this worker's copy, because the next pass of a living worker may begin hidden.
        reader.witness = witness
        torch_worker._worker_info = witness  # type: ignore[assignment]
        if self.init is not None:
            self.init(witness.number)
        # A function that only seeds also reads the number of its worker; one that divides has to touch the dataset.
        witness.asked = witness.divided = witness.asked and witness.touched


@final
class _Witness:
    """Stands in for torch's ``WorkerInfo`` in a worker and notices when the dataset divides itself by it.

    A dataset that ignores its worker would be read once by every worker and each sample be delivered several times; one
    that divides itself must not be divided again. Nothing but watching tells them apart.

    The number it tells is turned: torch takes the first batch of a pass from worker 0, and after a resume that has to
    be the one whose turn it was.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info, self._dataset = info, dataset
        self.number: int = info.id
        self.count: int = info.num_workers
        self.asked = self.touched = self.divided = self.hidden = False
        self.listening = True

    @classmethod
    def of(cls, info: Any, start: Start) -> "_Witness":
        """The one that ``WorkerInit`` left, ready for another pass."""
        assert isinstance(info, _Witness), "the loader's worker_init_fn was replaced after the loader was prepared"
        info.asked = info.divided
        return info.turned(start)

    def turned(self, start: Start) -> "_Witness":
        """Takes the number that is due at ``start``."""
        self.number = (self._info.id + start.turn) % self.count
        return self

    def hide(self, hidden: bool) -> None:
        """Makes this process look like the rank's own to whoever asks for a worker, or no longer so."""
        if hidden and self.divided:
            raise DataStateError(
                "worker_init_fn divides the dataset among workers, so a position in the undivided stream cannot be "
                "found; divide in the dataset's __iter__ instead, or resume with num_workers=0"
            )
        self.hidden = hidden
        torch_worker._worker_info = None if hidden else self  # type: ignore[assignment]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside is no reading: it may know its worker and asks for its own purposes."""
        self.listening = False
        torch_worker._worker_info = self  # type: ignore[assignment]
        try:
            yield
        finally:
            self.listening = True
            self.hide(self.hidden)

    @property
    def id(self) -> int:
        """The number of the worker; whoever asks is taken to divide by it."""
        self.asked = self.asked or self.listening
        return self.number

    @property
    def num_workers(self) -> int:
        """How many workers there are; asking counts as for ``id``."""
        self.asked = self.asked or self.listening
        return self.count

    @property
    def dataset(self) -> Any:
        """The user's dataset in this worker."""
        self.touched = True
        return self._dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


@final
class _Camera:
    """Takes a snapshot after every so many batches, or as often as is cheap."""

    def __init__(self, stream: object, every: int | None) -> None:
        self._stream: Any = stream if is_seekable(stream) else None
        self._every, self._batches = every, 0
        self._next = 0.0

    def take(self, at: int) -> Snapshot | None:
        if self._stream is None:
            return None
        self._batches += 1
        began = time.perf_counter()
        if self._batches % self._every if self._every else began < self._next:
            return None
        snapshot = Snapshot(at, self._stream.state_dict())
        ended = time.perf_counter()
        self._next = ended + (ended - began) / _SNAPSHOT_SHARE
        return snapshot


def _of_worker(entries: tuple[Any, ...], worker: int, default: Any) -> Any:
    if len(entries) == 1:
        return entries[0]
    return entries[worker] if worker < len(entries) else default
