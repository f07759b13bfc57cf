"""The progress of a loader: its position and the pass under way, whose deliveries are counted on demand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from accel_data.order.cursor import Cursor
from accel_data.position import Position
from accel_data.source import Pass, Source


@final
@dataclass(slots=True)
class LoaderProgress:
    """The progress that a loader shares with those that skip a part of it.

    Attributes:
        live: the pass that ``position`` is inside of, or was left in.
        saved: the state that was loaded, while no pass has begun and no other position was chosen since.
    """

    position: Position = field(default_factory=Position)
    live: Pass | None = None
    saved: Mapping[str, Any] | None = None
    _counted: int = 0

    def go(self, position: Position, live: Pass | None = None, saved: Mapping[str, Any] | None = None) -> None:
        """Takes a position that has nothing to do with the one before."""
        self.position, self.live, self.saved, self._counted = position, live, saved, 0

    def counted(self, source: Source) -> Position:
        """The position, with all that the pass under way has delivered. Not done for each batch, because it costs."""
        run = self.live
        if run is not None and run.delivered != self._counted:
            self._counted = run.delivered
            ended = run.at_end and source.ends_together
            self.position = self.position.delivered(run.step(run.delivered).cursor, ended=ended)
        return self.position

    def finish(self, run: Pass, source: Source) -> None:
        """``run`` is over: it ended if it is ``complete``, or was left. One that is not ``live`` changes nothing."""
        if self.live is not run:
            return
        position = self.counted(source)
        if run.complete:
            # Decided by what all ranks know: this rank may have no batch in an epoch in which others have one. A length
            # of the user's may be wrong, though.
            self.go(position.finished(advances=source.total_dataset_length != 0 or position.cursor.samples > 0))
        elif run.resumes:
            # ``live`` stays, because a state saved now needs the facts of its last step.
            self.position = position.left()
        else:
            self.go(position.left().given_up())

    def claim(self, run: Pass) -> None:
        """Takes ``run`` for the pass that counts, where it is nested in another."""
        if run is not self.live and not run.complete:
            self.go(Position().started(run.start), run)

    def undo(self) -> Callable[[], None]:
        """Returns a function that restores what is known now."""
        before = replace(self)

        def undo() -> None:
            self.go(before.position, before.live, before.saved)
            self._counted = before._counted

        return undo

    def begin_of(self, source: Source, batches: int) -> Cursor:
        """The start of the epoch of which a script skips ``batches`` batches."""
        begin, next_ = Cursor(self.counted(source).cursor.epoch), self.position.start
        if next_.epoch == begin.epoch or not self.position.is_loaded:
            return begin
        # Of an epoch that has ended a script that counts batches skips all; otherwise it means the next one.
        length = source.length(begin)
        return begin if length is not None and 0 < length <= batches else Cursor(next_.epoch)
