"""The user's DataLoader with a ``StreamReader`` in the place of its dataset."""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch

from accel_data.iterable.capabilities import choose_epoch, is_seekable
from accel_data.iterable.rewind import own_attributes, rewind
from accel_data.iterable.stride import Stride
from accel_data.iterable.worker import Delivered, Snapshot, Start, StreamReader, WorkerInit
from accel_data.map.skip import iterated, let_go
from accel_data.order.counter_rng import derive_key
from accel_data.private import copied, drop_iterator, kept_iterator

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@final
class ReaderPool:
    """Reads ``dataset`` by ``stride`` with the workers and all other options of the user's loader.

    Attributes:
        dataloader: a copy of the user's loader over ``dataset``, for those who look at its attributes.
    """

    def __init__(
        self, loader: "DataLoader[Any]", dataset: Any, stride: Stride, *, exact: bool, every: int | None
    ) -> None:
        self.stride = stride
        self.dataloader = copied(loader, dataset=dataset)
        batched, shared, collate = loader.batch_size is not None, loader.persistent_workers, loader.collate_fn
        reader = StreamReader(dataset, stride, collate, batched=batched, shared=shared, exact=exact, every=every)
        self._reader = reader
        init = WorkerInit(loader.worker_init_fn, reader)
        self._inner = copied(loader, dataset=reader, batch_sampler=None, collate_fn=_unchanged, worker_init_fn=init)
        self._reading: Iterator[Any] | None = None
        # A dataset that has loaded a state begins there again; this copy begins at the front.
        self._rewinds = is_seekable(dataset)
        self._unsought = own_attributes(dataset) if self._rewinds else dataset

    def begin(self, start: Start) -> None:
        """Chooses where the next pass begins. Living workers keep an epoch's number only, so a position ends them."""
        if not (start.plain and self._reader.start.plain):
            drop_iterator(self._inner)
        self._reader.begin(start)

    def open(self, stream: int, initial_seed: int | None) -> Iterator[Delivered]:
        """Starts the readers; the random state of this process stays as it is, also that of a resumed run.

        ``initial_seed``: see ``Pass.initial_seed``; ``stream``: equal for ranks that read the same stream.

        Workers that stay serve one pass at a time, so a pass inside another one starts workers, which stay instead.
        """
        inner, generator = self._inner, torch.Generator()
        if initial_seed is not None:
            key = derive_key(initial_seed, self._reader.start.epoch, stream)
            generator.manual_seed(key)
            self._reader.seed(key >> 1)
            if self._reading is not None and self._reading is kept_iterator(inner):
                drop_iterator(inner)
        self._reading = iterated(inner, generator)
        return self._reading

    def close(self, items: Iterator[Any]) -> None:
        """Ends the readers of the pass over ``items``, unless they are to stay."""
        if items is self._reading:
            self._reading = None
        let_go(self._inner)

    def rewind(self, snapshot: Snapshot, stop: int, ahead: int) -> None:
        """Moves the dataset back to element ``stop`` of its stream, if the next pass would lose ``ahead`` elements."""
        if self._rewinds:
            self._rewinds = rewind(self._reader.dataset, snapshot, stop, ahead)

    def first_batch(self) -> Delivered | None:
        """The first batch of this rank's stream, read here: it fills up steps of a pass that begins behind its end."""
        reader = copy.copy(self._reader)
        reader.start, reader.dataset = Start(reader.start.epoch), self._unsought
        choose_epoch(reader.dataset, reader.start.epoch)
        return next(iter(reader), None)


def _unchanged(item: Any) -> Any:
    return item
