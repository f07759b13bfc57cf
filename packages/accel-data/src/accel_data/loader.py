"""This rank's batches on its device, from a position that any number of ranks can take over.

A ``PreparedLoader`` is the user's DataLoader in every other respect: it is an instance of the same class, and what it
does not define itself falls through to it. What it reads from is a ``Source`` (see ``accel_data.source``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from accel_data.cursor import EPOCH_KEY, SAMPLES_KEY, Cursor, Window
from accel_data.options import LoaderOptions
from accel_data.source import Pass, Source
from accel_state.errors import DataStateError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.placement import Placer

STATE_VERSION = 1
VERSION_KEY = "version"
SOURCE_KEY = "source"
PRIVATE_KEY = "private"
_END = object()


class LoaderObserver(Protocol):
    """Told when a loader's pass starts and ends, for instance to know which loader is the active one."""

    def began(self, loader: "PreparedLoader") -> None:
        """The first batch is about to be read."""

    def ended(self, loader: "PreparedLoader") -> None:
        """The pass is over, was broken out of, or failed."""


@final
class PreparedLoader:
    """Iterate it like the DataLoader it was made from.

    Positions count samples *delivered* to the loop on all ranks together: ``state_dict`` taken on any rank, between
    any two batches, resumes at the next sample on any number of ranks. A pass that runs to its end moves on to the
    next epoch; one that is broken out of starts the same epoch again.

    Attributes:
        options: the choices this loader was prepared with.
    """

    def __init__(
        self,
        source: Source,
        *,
        options: LoaderOptions,
        placer: "Placer | None" = None,
        observer: LoaderObserver | None = None,
    ) -> None:
        self.options = options
        self._source = source
        self._placer = placer
        self._observer = observer
        self._next = Cursor()
        self._skipping = False
        self._live: Pass | None = None
        self._last: Pass | None = None

    def __iter__(self) -> Iterator[Any]:
        placer, observer = self._placer, self._observer
        run = self._begin()
        batches = run.batches
        complete = False
        if observer is not None:
            observer.began(self)
        try:
            following = next(batches, _END)
            while following is not _END:
                batch = following if placer is None else placer.start(following)
                following = next(batches, _END)
                if following is _END:
                    run.at_end = True
                run.delivered += 1
                self._last = run
                yield batch if placer is None else batch.take()
            complete = True
        finally:
            self._finish(run, complete)
            if observer is not None:
                observer.ended(self)

    def _begin(self) -> Pass:
        start = self._next
        run = self._source.begin(start)
        self._next = Cursor(start.epoch)
        self._live = self._last = run
        return run

    def _finish(self, run: Pass, complete: bool) -> None:
        run.close()
        if not complete or self._live is not run:
            return
        self._skipping = False
        epoch = run.step(run.delivered).cursor.epoch
        is_empty = run.delivered == 0 and self._source.length(Cursor(epoch)) == 0
        self._next = Cursor(epoch if is_empty else epoch + 1)
        self._live = None
