"""The seam between a prepared loader and whatever gives it batches.

A ``Source`` belongs to one loader for life; each time the user iterates, the loader asks it for one ``Pass`` from a
``Cursor``. There is one source for each way of reading:

- ``map_source.MapSource``: map-style data. The user's DataLoader is kept, its sampler replaced by ours.
- ``iterable.source.StreamSource``: iterable datasets, by the strategy that their capabilities allow.
- ``dispatch_source.DispatchSource``: rank 0 reads, all receive.

``select_source.select_source`` picks one. The loader itself looks one batch ahead, places batches on the device,
tells the observer, and counts what it has delivered; a source does none of that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from accel_data.order.cursor import Cursor, Step

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.map.index_agreement import IndexTrail

Json = Any
"""What JSON can say: dicts with string keys, lists, strings, numbers, booleans, None."""


class Pass(ABC):
    """One walk from a cursor to the end of its epoch.

    Attributes:
        start: set by the loader: where the pass began.
        batches: this rank's host batches. The loader calls ``next`` on it directly, so it costs no frame of ours.
        length: how many batches ``batches`` will give, or None when only its end tells.
        exact: ``length`` is certain, so that the loader need not look ahead to know the last batch.
        reads_in_step: ``next`` reads a batch in this process, and ``is_last`` is known then. The loader never reads
            ahead of the loop, because the dataset's random draws would come before those of the step.
        remainder: real samples in the last step over all ranks: -1 unknown, 0 the last step is full or padded with
            nothing. A pass may learn it as late as when its last batch is taken.
        delivered, at_end, complete: kept by the loader: batches handed to the user, whether the latest was the last,
            and whether the user then went on to the end of the loop.
        resumes: set by the loader: a run that is resumed reads the rest of this pass after the loop broke out of it.
        trail: the digests of the indices that every rank has to be given in this pass; None: they are computed.
        trouble: set by the loader: what another rank has said went wrong with it, for a pass that waits for others;
            None where nobody listens.
    """

    start: Cursor
    batches: Iterator[Any]
    length: int | None = None
    exact: bool = False
    reads_in_step: bool = False
    remainder: int = -1
    delivered: int = 0
    at_end: bool = False
    complete: bool = False
    resumes: bool = True
    trail: "IndexTrail | None" = None
    trouble: Callable[[], str | None] | None = None

    @property
    def is_last(self) -> bool:
        """Whether the batch taken last is the last one. Asked with ``reads_in_step`` only, before it is counted."""
        return self.delivered + 1 == self.length

    @property
    def readers(self) -> Iterator[Any]:
        """The iterator of the DataLoader below, which has the worker processes. Default: ``batches``."""
        return self.batches

    @abstractmethod
    def step(self, number: int) -> Step:
        """The facts after the ``number``-th batch of this pass (from 1) was delivered; 0: before the first.

        Asked rarely, and only about the last two batches taken from ``batches`` (the loader looks one ahead), so a
        pass that cannot compute them records them for those two. Also asked after ``close``.
        """

    def close(self) -> None:
        """The pass is over or was abandoned: stop threads, drop iterators. Default: drops the iterator."""
        self.batches = iter(())


@final
class NothingLeft(Pass):
    """The rest of an epoch that has ended: no batch."""

    length = 0
    exact = True
    remainder = 0

    def __init__(self, cursor: Cursor) -> None:
        self.batches, self._cursor = iter(()), cursor

    def step(self, number: int) -> Step:
        """The position that it began at."""
        return Step(self._cursor)


class Source(ABC):
    """What a loader reads from, as one rank sees it.

    Attributes:
        even_batches: fill up the last step so that every rank has a full batch. The loader may change it between
            passes (``join_uneven_inputs``); a source that cannot obey ignores it.
        total_batch_size: rows of one step over all ranks.
        total_dataset_length: samples of one epoch, or None when unknown.
        global_batch_size: samples of one accumulation window, where the source lays windows out; else None.
        reads_alone: no other rank takes part in reading a batch.
        reads_for_all: one rank reads, the others are given their part.
        dataloader: what the user's attribute accesses fall through to: a copy of the user's loader, all options kept.
    """

    even_batches: bool = True
    reads_alone: bool = False
    reads_for_all: bool = False
    total_batch_size: int
    total_dataset_length: int | None = None
    global_batch_size: int | None = None
    dataloader: "DataLoader[Any]"

    @property
    def read_amplification(self) -> int | None:
        """How often all data ranks and workers together read a sample for each time that it is delivered.

        None while only reading can tell. Default: once.
        """
        return 1

    @abstractmethod
    def begin(self, cursor: Cursor) -> Pass:
        """A pass over what is left of ``cursor.epoch``; also hands the epoch to samplers and datasets that want it."""

    @abstractmethod
    def length(self, cursor: Cursor) -> int | None:
        """How many batches this rank gets from ``cursor`` on; None when nobody can know."""

    @abstractmethod
    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        """Where a pass from ``cursor`` is after ``batches`` batches of each rank, without reading any data."""

    @property
    def keeps_state(self) -> bool:
        """Whether a saved position holds a state of the user's objects that changes as they are read."""
        return False

    @property
    def ends_together(self) -> bool:
        """Whether the last batch of a pass is the last on every rank: then its state says that the epoch has ended."""
        return False

    def is_over(self, cursor: Cursor) -> bool:
        """Whether it is certain that nothing is left of an epoch at ``cursor``. Default: only reading tells."""
        return False

    def epoch_chosen(self) -> int | None:
        """The epoch that the user set on a sampler since the last pass began; None: none was."""
        return None

    @abstractmethod
    def record(self, *, between: bool) -> dict[str, Json]:
        """What a saved position is only valid with (seed, kind of order, dataset's length, ...), as JSON values.

        ``between``: the position is the start of an epoch, and no longer inside the one that is being read.
        """

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes every ``restore`` from now on."""
        before = dict(vars(self))

        def undo() -> None:
            vars(self).update(before)

        return undo

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        """The record and cursor to ``restore`` where the user allows that the data have changed; warns of a change.

        Changes nothing. Default: as they were saved.
        """
        return record, cursor

    @abstractmethod
    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        """Takes over a saved ``record`` (its seed, for instance), so that the next pass may begin at ``cursor``.

        ``private`` is the ``Step.private`` that was saved with it, or None. Raises ``DataStateError``, identically on
        every rank, when the position belongs to other data; nothing has been changed then.
        """
