"""The reader of an iterable dataset, as it runs in a loader's worker or in the process of the rank."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from accel_data.iterable.capabilities import choose_epoch, is_seekable
from accel_data.iterable.stride import Stride, parts
from accel_data.map.global_rng import SeededGlobals, seed_globals, unchanged_globals
from accel_data.order.counter_rng import derive_key
from accel_data.order.iterators import continuing
from accel_data.private import show_worker_info
from accel_state.errors import DataError, DataStateError

_OF_COLLATION = 0xC011A7E
"""Separates the seeds of collation from those of the streams."""
_SNAPSHOT_SHARE = 0.05
"""Taking snapshots of a dataset's state may cost this share of the time; between them positions are counted."""


class Snapshot(NamedTuple):
    """The dataset's own state behind element ``at`` of the stream of its reader."""

    at: int
    state: Any


class Delivered(NamedTuple):
    """One collated batch with its facts, in a tuple that torch's pinning thread takes apart like any batch.

    ``part`` is ``real``, ``group_real`` and ``stop`` of its ``Part``. ``divided``: the dataset read which worker it is
    in, so each worker's stream is one of its own: a part of the rank's.
    """

    batch: Any
    part: tuple[int, int, int]
    worker: int
    divided: bool
    snapshot: Snapshot | None


@final
@dataclass(frozen=True, slots=True)
class Start:
    """Where the readers of one epoch begin; valid for that epoch only, later ones begin at the front.

    ``positions`` counts elements of the stream: one entry when all workers read the same stream, one for each worker
    when the dataset divides itself. ``turn`` is the worker whose batch comes next then. ``undivided``: the position was
    counted in a stream that no worker divided, so workers are hidden from the dataset. ``base``: elements that were
    counted before the first one that the dataset now yields.
    """

    epoch: int = 0
    positions: tuple[int, ...] = (0,)
    snapshots: tuple[Snapshot | None, ...] = (None,)
    turn: int = 0
    undivided: bool = False
    base: int = 0

    def of(self, worker: int) -> tuple[int, Snapshot | None]:
        """The position and the snapshot of one worker's stream."""
        one = len(self.positions) == 1, len(self.snapshots) == 1
        return self.positions[0 if one[0] else worker], self.snapshots[0 if one[1] else worker]

    @property
    def plain(self) -> bool:
        """Whether it is the front of an epoch."""
        return self == Start(self.epoch)


def open_stream(dataset: Any, snapshot: Snapshot | None) -> tuple[Iterator[Any], Any]:
    """An iterator of ``dataset`` behind ``snapshot``, and the object whose ``state_dict`` follows it.

    The iterator continues when ``iter`` is called on it. That object is the dataset or its iterator, or None where
    neither seeks: then the iterator is at the front.
    """
    in_dataset = is_seekable(dataset, in_worker=get_worker_info() is not None)
    if snapshot is not None and in_dataset:
        dataset.load_state_dict(copy.deepcopy(snapshot.state))  # it may go on to change what it was given
    iterator: Any = iter(dataset)
    stateful = dataset if in_dataset else iterator if is_seekable(iterator) else None
    if snapshot is not None and stateful is not None and not in_dataset:
        stateful.load_state_dict(copy.deepcopy(snapshot.state))
    return continuing(iterator), stateful


@final
class StreamReader(IterableDataset[Delivered]):
    """Reads a user's dataset for one rank and yields full collated batches.

    It takes the place of the dataset in the user's loader, whose own batching is switched off. Batches leave the
    workers together with the position behind them, so a position never counts what a worker has read ahead.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        stride: Stride,
        collate: Callable[[Any], Any],
        *,
        batched: bool,
        shared: bool,
        exact: bool = False,
        every: int | None = None,
    ) -> None:
        """``batched``: the loader makes batches of samples. ``shared``: workers outlive an epoch (persistent).

        ``exact``: hide workers from the dataset, so that it never divides itself. ``every``: batches after which a
        reader notes the dataset's own state (None: as often as is cheap).
        """
        self.dataset, self.stride, self.collate, self.batched = dataset, stride, collate, batched
        self._draws_nothing = collate is default_collate or collate is default_convert
        self.exact, self.every = exact, every
        self.start = Start()
        self.view: WorkerView | None = None
        self._camera: _Camera | None = None
        # Living workers hold a copy of this object: the epoch and the key of its draws reach them in shared memory.
        self._pass = torch.zeros(2, dtype=torch.int64, device="cpu")
        if shared:
            self._pass.share_memory_()

    def begin(self, start: Start) -> None:
        """Chooses the epoch and the position at which the next iteration begins."""
        self.start = start
        self._pass[0] = start.epoch
        choose_epoch(self.dataset, start.epoch)

    def seed(self, key: int) -> None:
        """Chooses the key, of 63 bits, of what workers draw in the next iteration."""
        self._pass[1] = key

    def __iter__(self) -> Iterator[Delivered]:
        epoch, key = self._pass.tolist()
        start = self.start if self.start.epoch == epoch else Start(epoch)
        info = get_worker_info() or self.view
        choose_epoch(self.dataset, epoch)
        if info is None:
            return self._deliver(start, 0, 1, None)
        assert isinstance(info, WorkerView), "the loader's worker_init_fn was replaced after the loader was prepared"
        info.begin(start)
        info.seed_pass(key)
        return self._deliver(start, info.number, info.count, info)

    def _deliver(self, start: Start, worker: int, workers: int, view: "WorkerView | None") -> Iterator[Delivered]:
        if view is not None:
            view.install(hidden=start.undivided or self.exact)
        position, snapshot = start.of(worker)
        front = [] if snapshot is None else self._first_group()
        elements, stateful = open_stream(self.dataset, snapshot)
        snapshot = None if stateful is None else snapshot  # where the dataset seeks no more, positions are counted
        # A generator runs only when it is read: the first element shows whether the dataset reads its worker. One that
        # goes on from a state of a divided stream need not do so again. One worker is read, too, because the order of
        # the stream may depend on there being one.
        first = list(islice(elements, 1))
        divided = view is not None and (view.asked or (snapshot is not None and not start.undivided))
        stride = self.stride if divided else replace(self.stride, worker=worker, workers=workers)
        begun = snapshot.at if snapshot is not None else start.base
        camera = self._camera = _Camera(stateful, self.every)
        for part in parts(chain(first, elements), stride, skip=position - begun, front=front if begun else ()):
            self._check(view, divided)
            stop = begun + part.stop
            # A stream that has ended may stand at its beginning again; inside another pass its state is of that one.
            usable = part.group_real == stride.group_size and camera is self._camera
            snapshot = camera.take(stop) if usable else None
            facts = part.real, part.group_real, stop
            content = part.elements if self.batched else part.elements[0]
            batch = self.collate(content) if view is None else self._collated(content, view, stop, divided=divided)
            yield Delivered(batch, facts, worker, divided, snapshot)
        self._check(view, divided)

    def _first_group(self) -> list[Any]:
        """The elements that complete the last group of the epoch, read before the dataset seeks to a position."""
        if not self.stride.even or self.stride.drop_last:
            return []
        with unchanged_globals():  # the seek follows, behind which what is drawn must not depend on this
            return list(islice(continuing(iter(self.dataset)), self.stride.group_size))

    def _check(self, view: "WorkerView | None", divided: bool) -> None:
        if view is not None and not divided and view.asked and view.count > 1:
            raise DataError(
                f"{type(self.dataset).__name__} asked which worker reads it only after its first element, when the "
                "stream was already divided; ask at the beginning of __iter__"
            )

    def _collated(self, content: Any, view: "WorkerView", stop: int, *, divided: bool) -> Any:
        asked, view.asked = view.asked, True  # collation may use the number of its worker, and divides nothing by it
        # A resume reads elements again and collates none of them again, so the draws of both are kept apart.
        seed = view.collation_seed(stop, self.stride.index, divided=divided)
        draws = nullcontext() if self._draws_nothing else SeededGlobals(seed)
        with view.installed(hidden=False), draws:
            batch = self.collate(content)
        view.asked = asked
        return batch


@final
class WorkerInit:
    """The user's ``worker_init_fn``, shown the user's dataset, because it may divide ``get_worker_info().dataset``."""

    def __init__(self, init: Callable[[int], None] | None, reader: StreamReader) -> None:
        self.init, self.reader = init, reader

    def __call__(self, worker: int) -> None:
        view = WorkerView(get_worker_info(), self.reader.dataset)
        view.begin(self.reader.start)
        view.install(hidden=False)
        self.reader.view = view  # because a later pass of a living worker may begin hidden
        if self.init is not None:
            self.init(view.number)
        # A function that only seeds also reads the number of its worker; one that divides has to touch the dataset.
        view.divided_at_start = view.asked and view.touched


@final
class WorkerView:
    """Stands in for torch's ``WorkerInfo`` and notices when the dataset divides itself by it.

    A dataset that ignores its worker would be read once by every worker and each sample be delivered several times; one
    that divides itself must not be divided again. Nothing but watching distinguishes the two: ``asked`` (since the pass
    began) and ``touched``, the dataset through this. ``divided_at_start``: ``worker_init_fn`` has divided it for good.

    Its number is rotated: torch takes the first batch of a pass from worker 0, and after a resume that has to be the
    one whose turn it was.

    Workers that read the same stream, on any rank, draw the same numbers, so that each element is drawn for alike
    whichever of them delivers it; one that reads a stream of its own draws numbers of its own from when it asks for its
    number.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info, self._dataset = info, dataset
        self.number: int = info.id
        self.count: int = info.num_workers
        self.asked = self.touched = self.divided_at_start = False
        self._key: int | None = None

    def seed_pass(self, key: int) -> None:
        """Seeds the global generators of this worker for one pass."""
        self._key = key
        seed_globals(derive_key(key, self.number) if self.asked and self.number else key)

    def collation_seed(self, stop: int, rank: int, *, divided: bool) -> int:
        """Returns the seed for collating the batch of ``rank`` behind which the stream of all ranks is at ``stop``."""
        return derive_key(self._key or 0, _OF_COLLATION, self.number if divided else 0, rank, stop)

    def _ask(self) -> None:
        if not self.asked and self.number and self._key is not None:
            seed_globals(derive_key(self._key, self.number))
        self.asked = True

    def begin(self, start: Start) -> None:
        """Takes the number that is due at ``start``."""
        self.asked = self.divided_at_start
        self.number = (self._info.id + start.turn) % self.count

    def install(self, *, hidden: bool) -> None:
        """Makes this what ``get_worker_info()`` returns; ``hidden``: that returns None, as in the rank's process."""
        if hidden and self.divided_at_start:
            raise DataStateError(
                "worker_init_fn divides the dataset among workers, so a position in the undivided stream cannot be "
                "found; divide in the dataset's __iter__ instead, or resume with num_workers=0"
            )
        show_worker_info(None if hidden else self)

    @contextmanager
    def installed(self, *, hidden: bool) -> Iterator[None]:
        """``install``, for a while."""
        before = get_worker_info()
        self.install(hidden=hidden)
        try:
            yield
        finally:
            show_worker_info(before)

    @property
    def id(self) -> int:
        """The number of the worker; a dataset that reads it is taken to divide itself by it."""
        self._ask()
        return self.number

    @property
    def num_workers(self) -> int:
        """How many workers there are; reading it counts as for ``id``."""
        self._ask()
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

    def __init__(self, stateful: Any, every: int | None) -> None:
        self._stateful = stateful
        self._every, self._batches = every, 0
        self._next = 0.0

    def take(self, at: int) -> Snapshot | None:
        if self._stateful is None:
            return None
        self._batches += 1
        began = time.perf_counter()
        if self._batches % self._every if self._every else began < self._next:
            return None
        # A copy, because what the dataset returns may be what it goes on to change.
        snapshot = Snapshot(at, copy.deepcopy(self._stateful.state_dict()))
        ended = time.perf_counter()
        self._next = ended + (ended - began) / _SNAPSHOT_SHARE
        return snapshot
