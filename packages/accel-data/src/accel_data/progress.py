"""Progress of a loader: its position and the pass in progress, whose deliveries are counted on demand."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from accel_data.order.cursor import Cursor
from accel_data.position import Position
from accel_data.source import NothingLeft, Pass, Source


@final
@dataclass(slots=True)
class LoaderProgress:
    """Progress shared by a loader and its skipped versions.

    Attributes:
        live: the pass that ``position`` is inside of, or was left in.
        saved: the loaded state, as long as no pass has begun and no other position was chosen since.
        choice: start of the epoch that ``set_epoch`` chose last, another object for each choice; None: it chose none.
    """

    position: Position = field(default_factory=Position)
    live: Pass | None = None
    saved: Mapping[str, Any] | None = None
    choice: Cursor | None = None
    _counted: int = 0

    def go(self, position: Position, live: Pass | None = None, saved: Mapping[str, Any] | None = None) -> None:
        """Sets a position that is unrelated to the previous one."""
        self.position, self.live, self.saved, self._counted = position, live, saved, 0

    def counted(self, source: Source) -> Position:
        """Returns the position after all deliveries of the pass; on demand, because it is too slow per batch."""
        run = self.live
        if run is not None and run.delivered != self._counted:
            self._counted = run.delivered
            ended = run.at_end and source.ends_together
            self.position = self.position.delivered(run.step(run.delivered).cursor, ended=ended)
        return self.position

    def finish(self, run: Pass, source: Source) -> None:
        """Ends ``run``, the live pass, which is ``complete`` or was left."""
        if run.complete:
            if run.start.samples and not (run.delivered or self.position.ended or isinstance(run, NothingLeft)):
                warn_of_rest(source, run.start)
            position = self.counted(source)
            # Decided by facts that all ranks share, because this rank may have no batch in an epoch in which others
            # have one. The length of a user's dataset may be wrong, hence the second condition.
            self.go(position.finished(advances=source.total_dataset_length != 0 or position.cursor.samples > 0))
        elif run.resumes:
            # ``live`` stays, because a state saved now needs the facts of its last step.
            self.position = self.counted(source).left()
        else:  # whose deliveries need no count, because nothing continues after them
            self.go(self.position.left().given_up())

    def claim(self, run: Pass) -> None:
        """Makes ``run`` the pass that counts, if it is nested in another."""
        if run is not self.live and not run.complete:
            self.go(Position().started(run.start), run)

    def undo(self) -> Callable[[], None]:
        """Returns a function that restores the current progress."""
        position, live, saved, counted = self.position, self.live, self.saved, self._counted

        def undo() -> None:
            self.go(position, live, saved)
            self._counted = counted

        return undo

    def begin_of(self, source: Source, batches: int) -> Cursor:
        """Returns the start of the epoch of which a script skips ``batches`` batches."""
        begin, next_ = Cursor(self.counted(source).cursor.epoch), self.position.start
        if next_.epoch == begin.epoch or not self.position.is_loaded:
            return begin
        # A script that counts batches skips all of an epoch that has ended; otherwise it means the next epoch.
        length = source.length(begin)
        return begin if length is not None and 0 < length <= batches else Cursor(next_.epoch)


def warn_of_rest(source: Source, cursor: Cursor) -> None:
    """Warns, on every rank, that ``drop_last`` drops what is left behind a loaded position: less than a step here."""
    total, loader = source.total_dataset_length, source.dataloader
    drops = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    if not drops or total == cursor.samples:
        return
    left = "what is left" if total is None else f"the {total - cursor.samples} samples that are left"
    step = source.global_batch_size or source.total_batch_size
    warnings.warn(
        f"no batch is left in epoch {cursor.epoch} behind the loaded position, sample {cursor.samples}: a step of all "
        f"ranks takes {step} samples here, and drop_last=True drops {left} as less than one. To deliver them, resume "
        "on fewer ranks, with a smaller batch size, or with drop_last=False",
        RuntimeWarning,
        stacklevel=3,
    )
