"""Interface between a prepared loader and the source of its batches.

A ``Source`` belongs to one loader; at each iteration the loader requests one ``Pass`` from a ``Cursor``. There is one
source for each way of reading:

- ``map.source.MapSource``: map-style data. The user's DataLoader is kept, with accel's sampler instead of its own.
- ``iterable.source.StreamSource``: iterable datasets, by the strategy that their capabilities allow.
- ``dispatch.source.DispatchSource``: rank 0 reads, all ranks receive.

``prepare.open_source`` opens the one that a ``LoaderSpec`` asks for. A source hands its pass one value with all that
the pass needs; a pass does not know its source. Lookahead, copies to the device, the observer and the count of
delivered batches are the loader's; a source does none of that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from accel_data.order.cursor import Cursor, Step

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.map.index_agreement import IndexTrail

Json = Any
"""JSON values: dicts with string keys, lists, strings, numbers, booleans, None."""


KIND_KEY = "kind"
"""Key of a record: the kind of its source. The records of map-style data have none."""
_INITIAL_SEED_KEY = "initial_seed"
_FIXED = (
    "batch_size",
    "batch_sampler",
    "sampler",
    "drop_last",
    "dataset",
    "persistent_workers",
    "num_workers",
    "generator",
    "in_order",
)
"""Attributes of a DataLoader that a prepared one does not allow to set; the first six are torch's rule."""


class Pass(ABC):
    """One pass from a cursor to the end of its epoch.

    Attributes:
        start: set by the loader: cursor at which the pass began.
        batches: this rank's host batches. The loader calls ``next`` on it directly, without a frame of accel in
            between.
        length: number of batches of ``batches``, or None if it is known only at the end.
        exact: whether ``length`` is certain, so that the loader detects the last batch without lookahead.
        reads_in_step: whether ``next`` reads a batch in this process, and ``is_last`` is known then. The loader then
            uses no lookahead, because the dataset's random draws would precede those of the step.
        remainder: real samples in the last step over all ranks: -1 unknown, 0 the last step is full or not padded. May
            be known only when the last batch is taken.
        delivered, at_end, complete: set by the loader: number of batches yielded to the user, whether the latest was
            the last, and whether the user then continued to the end of the loop.
        resumes: set by the loader: whether a resumed run reads the rest of this pass after the loop broke out of it.
        trail: digests of the indices that every rank must get in this pass; None: the indices are computed.
        trouble: set by the loader: returns the failure report of another rank, for a pass that waits for others; None
            if the loader has no alarm.
        initial_seed: torch's initial seed from which the draws of the pass's workers follow; None: there are none.
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
    initial_seed: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether the batch taken last is the last one. Read only with ``reads_in_step``, before it is counted."""
        return self.delivered + 1 == self.length

    @property
    def readers(self) -> Iterator[Any]:
        """Iterator of the underlying DataLoader, which owns the worker processes. Default: ``batches``."""
        return self.batches

    @abstractmethod
    def step(self, number: int) -> Step:
        """Returns the facts after the ``number``-th batch of this pass (from 1) was delivered; 0: before the first.

        Called rarely, and only for the last two batches taken from ``batches`` (because of the lookahead), so a pass
        that cannot compute the facts records them for those two. May be called after ``close``.
        """

    def private(self) -> Mapping[str, Any] | None:
        """Returns what this rank alone needs to resume after the batch delivered last; None: nothing.

        torch's initial seed is part of the state of its generator, which the checkpoint of a run has. It is another one
        if the script has seeded torch since the pass began.
        """
        private = self.step(self.delivered).private
        if self.initial_seed in (None, torch.initial_seed()):
            return private
        return {**(private or {}), _INITIAL_SEED_KEY: self.initial_seed}

    def close(self) -> None:
        """Stops threads and drops iterators once the pass has ended or was abandoned. Default: drops the iterator."""
        self.batches = iter(())

    def rewind(self, private: Mapping[str, Any] | None) -> None:
        """Moves a dataset that keeps its own position back to where ``private`` was noted, once the pass is closed.

        The next pass would otherwise lack what was read ahead. ``private``: ``Step.private`` of the batch delivered
        last. Default: nothing is read ahead of it that matters.
        """
        return


@final
class NothingLeft(Pass):
    """Rest of a finished epoch: no batches."""

    length = 0
    exact = True
    remainder = 0

    def __init__(self, cursor: Cursor) -> None:
        self.batches, self._cursor = iter(()), cursor

    def step(self, number: int) -> Step:
        """Returns the start position."""
        return Step(self._cursor)


class Source(ABC):
    """Source of a loader's batches on one rank.

    Attributes:
        even_batches: pad the last step so that every rank has a full batch. The loader may change it between passes
            (``join_uneven_inputs``); a source that does not support it ignores it.
        total_batch_size: rows of one step over all ranks.
        total_dataset_length: samples of one epoch, or None if unknown.
        global_batch_size: samples of one accumulation window, if the source defines windows; otherwise None.
        reads_alone: whether no other rank takes part in reading a batch.
        reads_for_all: whether one rank reads and sends the others their rows.
        dataloader: target of the user's attribute accesses: a copy of the user's loader with all options kept.
    """

    even_batches: bool = True
    reads_alone: bool = False
    reads_for_all: bool = False
    total_batch_size: int
    total_dataset_length: int | None = None
    global_batch_size: int | None = None
    dataloader: "DataLoader[Any]"
    _saved_seed: tuple[Cursor, int] | None = None

    @property
    def read_amplification(self) -> int | None:
        """How often all data ranks and workers together read a sample per delivery.

        None as long as only reading can show it. Default: once.
        """
        return 1

    @abstractmethod
    def begin(self, cursor: Cursor) -> Pass:
        """Returns a pass over the rest of ``cursor.epoch``; also calls ``set_epoch`` of samplers and datasets."""

    def assign(self, name: str, value: object) -> None:
        """Sets an attribute of the DataLoader, which applies from the next pass on.

        Raises:
            ValueError: the attribute is one that torch's DataLoader does not allow to set, or that decides how the
                ranks share the data.
        """
        if name in _FIXED:
            raise ValueError(
                f"{name} cannot be set on a prepared loader, which was made for the {name} of its DataLoader: make "
                f"another DataLoader with {name}={_short(value)}, and prepare that"
            )
        setattr(self.dataloader, name, value)

    def initial_seed(self, cursor: Cursor) -> int:
        """Returns ``Pass.initial_seed`` for a pass that begins at ``cursor``: that of the saved run, if it resumes."""
        saved, self._saved_seed = self._saved_seed, None
        return torch.initial_seed() if saved is None or saved[0] != cursor else saved[1]

    def restore_seed(self, cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        """Takes over the initial seed of a saved ``Pass.private``, if it has one, for a pass from ``cursor``."""
        seed = (private or {}).get(_INITIAL_SEED_KEY)
        self._saved_seed = None if seed is None else (cursor, seed)

    @abstractmethod
    def length(self, cursor: Cursor) -> int | None:
        """Returns the number of this rank's batches from ``cursor`` on; None if it cannot be known."""

    @abstractmethod
    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        """Returns the cursor after ``batches`` batches of each rank from ``cursor``, without reading any data."""

    @property
    def keeps_state(self) -> bool:
        """Whether a saved position includes a state of the user's objects that changes as they are read."""
        return False

    @property
    def ends_together(self) -> bool:
        """Whether the last batch of a pass is the last on every rank, so that its state marks the epoch as ended."""
        return False

    def is_over(self, cursor: Cursor) -> bool:
        """Whether the epoch is certainly finished at ``cursor``. Default: False, because only reading shows it."""
        return False

    def epoch_chosen(self) -> int | None:
        """Returns the epoch that was set on a user's sampler since ``begin`` or ``announce``; None if none was set."""
        return None

    def announce(self, epoch: int) -> None:
        """Sets the epoch of the next pass on the user's samplers, so that another one that is set on them is noticed.

        Default: there are no samplers.
        """
        return

    @abstractmethod
    def record(self, *, between: bool) -> dict[str, Json]:
        """Returns the facts for which a saved position is valid (seed, order, dataset length, ...), as JSON values.

        ``between``: the position is the start of an epoch, rather than inside the epoch that is being read.
        """

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes every ``restore`` from now on."""
        before = dict(vars(self))

        def undo() -> None:
            vars(self).update(before)

        return undo

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        """Returns the record and cursor to ``restore`` if the user allows changed data; warns of a change.

        Changes nothing. Default: the saved ones.
        """
        return record, cursor

    @abstractmethod
    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        """Takes over a saved ``record`` (for example its seed), so that the next pass may begin at ``cursor``.

        ``private`` is the ``Pass.private`` that was saved with it, or None. Raises ``DataStateError``, identically on
        every rank, if the position belongs to other data; the source is unchanged then.
        """


def _short(value: object) -> str:
    return repr(value) if isinstance(value, int | None) else "..."
