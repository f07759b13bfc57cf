"""Prepared loader: this rank's batches on its device, from a position that any number of ranks can resume.

A ``PreparedLoader`` is an instance of the class of the user's DataLoader, and delegates attributes that it does not
define to it. It reads from a ``Source`` (see ``accel_data.source``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from accel_data.loader_state import SavedLoader
from accel_data.map.skip import whole_batches
from accel_data.observer import LoaderObserver
from accel_data.options import LoaderOptions
from accel_data.order.cursor import Cursor, Window, as_integer
from accel_data.position import Phase, Position
from accel_data.progress import LoaderProgress, warn_of_rest
from accel_data.source import NothingLeft, Pass, Source
from accel_data.workers import tell

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.device.prefetch import Placer
    from accel_data.failure_relay import Alarm, Watch

_END = object()
_OWN = ("options", "gate")
"""Public attributes that are set in the constructor."""


@final
class PreparedLoader:
    """Iterates over this rank's batches, like the DataLoader that it was made from.

    An attribute of that DataLoader that is set here applies from the next pass on, or is a ``ValueError``: torch's
    classes refuse a new ``batch_size``, ``sampler``, ``batch_sampler``, ``drop_last``, ``dataset`` or
    ``persistent_workers``, and prepared loaders a new ``num_workers``, ``generator`` or ``in_order`` as well.

    Positions count samples *delivered* to the loop on all ranks together: a ``state_dict`` taken on any rank, between
    any two batches, resumes at the next sample on any number of ranks. Every pass reads the next epoch, whether the
    previous pass ended or the loop broke out of it. A nested pass over the same loader reads the same epoch from its
    start, and does not move the position.

    Attributes:
        options: options that this loader was prepared with.
        gate: stop hook: wraps the batches of every later pass, given this loader and the batches. It is called for each
            batch after the loop is done with the previous one, and may end the pass there. None: no hook.
    """

    _progress: LoaderProgress
    _start: Cursor | None
    """Start of the next pass, if it is not that of the position."""
    _skips: int | None
    """Batches between the start of an epoch and ``_start``; None: it was not counted from there."""
    _choice: Cursor | None
    """``LoaderProgress.choice`` that ``_start`` follows."""
    _last: Pass | None

    def __init__(
        self,
        source: Source,
        *,
        options: LoaderOptions,
        placer: "Placer | None" = None,
        observer: LoaderObserver | None = None,
        alarm: "Alarm | None" = None,
    ) -> None:
        self.options = options
        self._source = source
        self._placer = placer
        self._observer, self._alarm = observer, alarm
        self.gate: Callable[[PreparedLoader, Iterator[Any]], Iterator[Any]] | None = None
        # Past ``__setattr__``, which looks for the DataLoader's attributes; a pass sets some of these for each batch.
        vars(self).update(_progress=LoaderProgress(), _start=None, _skips=None, _choice=None, _last=None)

    def __iter__(self) -> Iterator[Any]:
        observer, own = self._observer, vars(self)
        run = self._begin()
        watch = None if self._alarm is None else self._alarm.watch(run.trail)
        complete = False
        if observer is not None:
            observer.began(self)
        batches = run.batches
        if watch is not None:
            batches, run.trouble = watch.heeding(batches), watch.said
        batches = batches if self.gate is None else self.gate(self, batches)
        try:
            if run.exact and self._placer is None:
                left = run.length or 0
                for batch in batches:
                    left -= 1
                    run.at_end = left == 0
                    run.delivered += 1
                    own["_last"] = run
                    yield batch
            else:
                following = self._in_step if run.reads_in_step else self._ahead
                for batch in following(run, batches):
                    run.delivered += 1
                    own["_last"] = run
                    yield batch
            complete = True
        except BaseException as error:
            tell(run, watch, error)
            raise
        finally:
            self._finish(run, watch, complete)
            if observer is not None:
                observer.ended(self)

    def _ahead(self, run: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields device batches with one batch of lookahead, which detects the last and overlaps copy and step."""
        placer = self._placer
        current = next(batches, _END)
        if placer is not None and current is not _END:
            current = placer.start(current)
        while current is not _END:
            following = next(batches, _END)
            if following is _END:
                run.at_end = True
            elif placer is not None:
                following = placer.start(following)
            yield current if placer is None else current.take()  # type: ignore[attr-defined]
            current = following

    def _in_step(self, run: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields device batches without lookahead: each is read when the loop requests it."""
        placer = self._placer
        for batch in batches:
            run.at_end = run.is_last
            yield batch if placer is None else placer.start(batch).take()

    def _begin(self) -> Pass:
        self._follow_sampler()
        progress, position, sought = self._progress, self._counted(), self._sought()
        if position.nests and sought is None:
            progress.position = position.nested()
            start = Cursor(position.epoch)
            run = self._source.begin(start)
        else:
            start = position.start if sought is None else sought
            run = NothingLeft(start) if position.spent and sought is None else self._source.begin(start)
            progress.go(position.started(start), run)
        run.start = start
        self._start, self._last = None, run
        return run

    def _finish(self, run: Pass, watch: "Watch | None", complete: bool) -> None:
        run.complete = complete
        run.close()
        if watch is not None:
            watch.close()
        if self._progress.live is run:
            self._follow_sampler()
            self._progress.finish(run, self._source)

    def _follow_sampler(self) -> None:
        """Chooses the epoch that the script has set on a sampler, if any."""
        epoch = self._source.epoch_chosen()
        if epoch is not None:
            self.set_epoch(epoch)

    def _sought(self) -> Cursor | None:
        """Returns the start of the next pass, in the epoch chosen last, if it is not that of the position."""
        choice, start = self._progress.choice, self._start
        if start is not None and choice is not None and choice is not self._choice and choice.epoch != start.epoch:
            self._start = None if self._skips is None else _after(self._source, choice, self._skips)
        self._choice = choice
        return self._start

    def claim(self) -> None:
        """Makes the innermost pass in progress the one whose position is saved and resumed.

        An Accelerator calls this when a loss of a batch goes backward: the outer pass is then known to be abandoned.
        """
        if self._last is not None:
            self._last.resumes = True
            self._progress.claim(self._last)

    def disclaim(self) -> None:
        """Makes a resumed run begin the next pass, as this run does, if the loop breaks out of the innermost pass.

        That is correct for an evaluation of a few batches. ``claim`` undoes it.
        """
        if self._last is not None:
            self._last.resumes = False

    def _counted(self) -> Position:
        return self._progress.counted(self._source)

    def __len__(self) -> int:
        """Number of batches of one epoch on this rank (of the rest of it, for a loader from ``skip_first_batches``).

        Raises:
            TypeError: the number is unknown, as for an iterable dataset without a length.
        """
        sought = self._sought()
        length = self._source.length(Cursor(self.epoch) if sought is None else sought)
        if length is None:
            raise TypeError(f"the number of batches is unknown: {type(self.dataset).__name__} has no length")
        return length

    @property
    def position(self) -> Cursor:
        """Epoch, and number of its samples delivered on all ranks together."""
        position = self._counted()
        return position.start if position.is_loaded else position.cursor

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or the next one between passes."""
        return self._counted().epoch

    @property
    def iteration(self) -> int:
        """Same as ``epoch``: the number of finished passes, unless ``set_epoch`` was called."""
        return self.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.set_epoch(value)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass. A resumed position in this epoch is kept; skipped batches are of this epoch.

        Raises:
            DataStateError: ``epoch`` is not an integer >= 0.
        """
        given = as_integer(epoch)
        choice = self._progress.choice = Cursor(epoch if given is None else given)
        before = self._counted()
        after = before.with_epoch(choice.epoch)
        if after.phase in (Phase.INSIDE, Phase.LOADED):
            self._progress.position = after
        elif after != before:
            self._progress.go(after)

    def skip(self, batches: int) -> None:
        """Moves the start of the next pass forward by ``batches`` batches, without reading them."""
        position = self._counted()
        start = _after(self._source, position.start, batches)
        self._progress.go(position.sought(start))
        self._start, self._skips, self._choice = start, None, self._progress.choice

    def skipped(self, batches: int) -> "PreparedLoader":
        """Returns this loader with a next pass that starts ``batches`` batches after the start of the epoch.

        If the next pass of this loader skips batches itself, the new loader skips these in addition. Both loaders share
        one position: a batch that the new loader delivers counts as delivered by this one too, so this loader's next
        pass and its ``state_dict`` continue from there.
        """
        other = PreparedLoader(
            self._source, options=self.options, placer=self._placer, observer=self._observer, alarm=self._alarm
        )
        self._follow_sampler()
        sought, skips = self._sought(), whole_batches(batches)
        begin = self._progress.begin_of(self._source, skips) if sought is None else sought
        other.gate, other._progress, other._choice = self.gate, self._progress, self._choice
        other._start = _after(self._source, begin, skips)
        before = 0 if sought is None else self._skips
        other._skips = None if before is None else before + skips
        return other

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch delivered last is the last of its pass on this rank."""
        return self._last is not None and self._last.at_end

    @property
    def remainder(self) -> int:
        """Samples in the last step of the pass over all ranks: -1 unknown, 0 the last step is full."""
        return -1 if self._last is None else self._last.remainder

    @property
    def batches_left(self) -> int | None:
        """Number of batches left in this pass; None if it is unknown until the end."""
        run = self._last
        if run is None:
            return None
        if run.at_end:
            return 0
        # A length of the user's that is too small: the pass continues, and the number of batches left is unknown.
        return run.length - run.delivered if run.length is not None and run.length > run.delivered else None

    @property
    def real_counts(self) -> tuple[int, ...] | None:
        """By data rank, the number of rows of the last batch that are not padding; see ``Step.real_counts``."""
        return None if self._last is None else self._last.step(self._last.delivered).real_counts

    @property
    def batch_rows(self) -> int | None:
        """Number of rows of this rank's last batch, padding included; None: unknown, or no padding."""
        filled: int | None = getattr(self._placer, "rows", None)
        if filled is not None or self._last is None:
            return filled
        return self._last.step(self._last.delivered).rows

    @property
    def window(self) -> Window | None:
        """Index of the batch delivered last in its global batch; with ``global_batch_size`` only."""
        return None if self._last is None else self._last.step(self._last.delivered).window

    @property
    def weight(self) -> float:
        """Weight of the last batch's mean loss among the ranks of a sequence-parallel group; otherwise 1.0."""
        return getattr(self._placer, "weight", 1.0)

    @property
    def reads_alone(self) -> bool:
        """Whether this rank reads its batches independently, so that it can stop reading at any batch."""
        return self._source.reads_alone

    @property
    def reads_for_all(self) -> bool:
        """Whether one rank reads the dataset and sends the others their rows."""
        return self._source.reads_for_all

    @property
    def read_amplification(self) -> int | None:
        """How often all data ranks and workers read a sample per delivery; None until reading has shown it."""
        return self._source.read_amplification

    @property
    def total_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self._source.total_batch_size

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one accumulation window, if this loader defines windows; otherwise None."""
        return self._source.global_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of one epoch; raises ``TypeError`` if unknown."""
        length = self._source.total_dataset_length
        if length is None:
            raise TypeError(f"the number of samples is unknown: {type(self.dataset).__name__} has no length")
        return length

    @property
    def base_dataloader(self) -> "DataLoader[Any]":
        """Copy of the user's DataLoader with accel's sampler instead of the user's."""
        return self._source.dataloader

    @contextmanager
    def override_even_batches(self, even_batches: bool) -> Iterator[None]:
        """Sets ``even_batches`` for passes that begin inside the block, whatever the options say."""
        before = self._source.even_batches
        self._source.even_batches = even_batches
        try:
            yield
        finally:
            self._source.even_batches = before

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch delivered last, as JSON values; the same on every rank.

        Only an opaque iterable dataset adds state of this rank alone, under ``"private"``, and a script that has seeded
        torch since the epoch of a loader with workers began. A loaded state from which no pass has begun is returned
        unchanged.
        """
        position, progress = self._counted(), self._progress
        if progress.saved is not None:
            return dict(progress.saved)
        private = None if progress.live is None else progress.live.private()
        record = self._source.record(between=progress.live is None or position.ended)
        return SavedLoader(position.cursor, record, position.ended, private).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow_changed_data: bool | None = None) -> None:
        """Makes the next pass start at a saved position, for any number of ranks and workers and any batch size.

        A position at the end of an epoch starts the next epoch, unless ``set_epoch`` names the finished epoch: then the
        next pass is empty, as scripts that count epochs expect.

        ``allow_changed_data`` (None: as in the options) accepts a position inside an epoch of a dataset that has
        changed since. If a map-style dataset has grown, the epoch is finished over its original samples, and the new
        samples are read from the next epoch on. The position is kept if a map-style dataset has shrunk and is read
        sequentially, if it has another fingerprint and the same length, or if an iterable dataset does not end before
        it. Otherwise the epoch starts again. A warning with numbers reports which case applies.

        Raises:
            DataStateError: the state is of a newer version, incomplete, or of other data. The loader is unchanged then.
        """
        saved = SavedLoader.read(state_dict)
        state = saved
        if self.options.allow_changed_data if allow_changed_data is None else allow_changed_data:
            state = saved.moved(*self._source.adapted(saved.record, saved.cursor))
        self._source.restore(state.record, state.cursor, state.private)
        ended = state.ended
        if not ended and self._source.is_over(state.cursor):
            ended = True
            warn_of_rest(self._source, state.cursor)
        self._progress.go(Position().loaded(state.cursor, ended=ended), saved=state.state_dict())
        self._start = None
        self._source.announce(self._progress.position.epoch)

    def undo(self) -> Callable[[], None]:
        """Returns a function that undoes every ``load_state_dict`` from now on, for a load that another object refuses.

        A pass in progress then continues to count, as if nothing had been loaded.
        """
        source, progress, start = self._source.undo(), self._progress.undo(), self._start

        def undo() -> None:
            source()
            progress()
            self._start = start
            self._source.announce(self._progress.position.epoch)

        return undo

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's DataLoader, so that ``isinstance`` is true for both classes."""
        return type(self._source.dataloader)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in _OWN or hasattr(PreparedLoader, name)
        if own or not hasattr(self._source.dataloader, name):
            object.__setattr__(self, name, value)
        else:
            self._source.assign(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source.dataloader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        dropped = {"_last": None, "_observer": None, "_alarm": None, "gate": None}
        position = self._counted()
        if position.phase is Phase.INSIDE:
            position = position.loaded(position.cursor, ended=position.ended)
        progress = LoaderProgress(position, saved=self._progress.saved, choice=self._progress.choice)
        state = {**self.__dict__, "_progress": progress, **dropped}
        return _rebuilt, (state,)


def _after(source: Source, cursor: Cursor, batches: int) -> Cursor:
    """Returns the cursor ``batches`` of this rank's batches after ``cursor``."""
    return source.skip(cursor, whole_batches(batches))


def _rebuilt(state: dict[str, Any]) -> PreparedLoader:
    loader = object.__new__(PreparedLoader)
    loader.__dict__.update(state)
    return loader
