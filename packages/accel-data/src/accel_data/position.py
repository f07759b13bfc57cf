"""Position of a loader: a value with named states, and the transitions between them.

``Position`` is independent of batches, ranks and processes. A loader holds one, applies a transition for each event of
its loop, and saves ``cursor`` and ``ended``. Because a position is a value, a refused load is undone by restoring the
previous value.

======== ========================================= ==================================================
state    meaning                                   the next pass begins
======== ========================================= ==================================================
BEFORE   no pass is in progress                     at ``cursor``
INSIDE   a pass has delivered up to ``cursor``     in the next epoch
LEFT     the loop broke out of a pass at ``cursor`` in the next epoch, so with another order
LOADED   ``cursor`` was saved by this or another   at ``cursor``; in the next epoch if the epoch had ended
         run, and no pass has begun since
======== ========================================= ==================================================

A resumed run continues at ``cursor`` in every state: a position that was saved INSIDE or LEFT is LOADED there.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import final

from accel_data.order.cursor import Cursor


class Phase(Enum):
    """State of a position."""

    BEFORE = "before a pass"
    INSIDE = "inside a pass"
    LEFT = "left inside a pass"
    LOADED = "loaded"


@final
@dataclass(frozen=True, slots=True)
class Position:
    """Position of one loader.

    Attributes:
        phase: the state.
        cursor: epoch, and number of its samples delivered on all ranks together.
        ended: whether the epoch is finished, although the loop has not requested the end yet. A run that resumes here
            continues with the next epoch.
        chosen: the epoch that ``set_epoch`` chose: INSIDE for the next pass (None: the following epoch), LOADED the
            loaded epoch itself, if it had ended.
        idle: INSIDE, whether nothing was delivered since another pass began inside this one, or an epoch was chosen.
    """

    phase: Phase = Phase.BEFORE
    cursor: Cursor = field(default_factory=Cursor)
    ended: bool = False
    chosen: int | None = None
    idle: bool = False

    @property
    def start(self) -> Cursor:
        """Start of the next pass that is not nested in the one in progress."""
        if self.phase is Phase.BEFORE or (self.phase is Phase.LOADED and (self.spent or not self.ended)):
            return self.cursor
        return Cursor(self.cursor.epoch + 1 if self.chosen is None else self.chosen)

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or the next one between passes."""
        return self.cursor.epoch if self.phase is Phase.INSIDE else self.start.epoch

    @property
    def is_loaded(self) -> bool:
        """Whether the position was loaded, and no pass has begun since."""
        return self.phase is Phase.LOADED

    @property
    def spent(self) -> bool:
        """Whether the next pass is empty: the script chose the loaded epoch, which had ended."""
        return self.phase is Phase.LOADED and self.ended and self.chosen is not None

    @property
    def nests(self) -> bool:
        """Whether a pass that begins now is nested in the one in progress.

        A loop with two passes cannot be distinguished from a loop that abandoned the first pass and keeps its iterator.
        The first pass is therefore taken as abandoned once a second pass begins without a delivery of the first in
        between, or once an epoch was chosen since its last delivery.
        """
        return self.phase is Phase.INSIDE and not self.idle

    def started(self, cursor: Cursor) -> "Position":
        """Transition: a pass begins at ``cursor``."""
        return Position(Phase.INSIDE, cursor)

    def nested(self) -> "Position":
        """Transition: a nested pass begins, which does not affect the outer one."""
        return replace(self, idle=True)

    def delivered(self, cursor: Cursor, *, ended: bool) -> "Position":
        """Transition: the pass has delivered up to ``cursor``, which is the end of the epoch if ``ended``."""
        return Position(self.phase, cursor, ended, self.chosen)

    def left(self) -> "Position":
        """Transition: the loop broke out of the pass, or failed in it."""
        return Position(Phase.LEFT, self.cursor, self.ended, self.chosen)

    def given_up(self) -> "Position":
        """Transition: a resumed run should not read the rest of a pass that was left either (an evaluation)."""
        return self if self.phase is not Phase.LEFT else Position(cursor=self.start)

    def finished(self, *, advances: bool = True) -> "Position":
        """Transition: the pass has ended. ``advances`` is False for an epoch without samples."""
        epoch = self.cursor.epoch + 1 if advances else self.cursor.epoch
        return Position(cursor=Cursor(epoch if self.chosen is None else self.chosen))

    def sought(self, cursor: Cursor) -> "Position":
        """Transition: the next pass begins at ``cursor``."""
        return Position(cursor=cursor)

    def with_epoch(self, epoch: int) -> "Position":
        """Transition of ``set_epoch``: the next pass reads ``epoch``.

        A loaded position in ``epoch`` is kept, so that a script that counts epochs resumes inside the epoch that it was
        saved in; if that epoch had ended, the script's pass over it is empty.
        """
        if self.phase is Phase.INSIDE:
            same = epoch == self.cursor.epoch
            return replace(self, chosen=None if same else epoch, idle=self.idle or not same)
        if self.phase is Phase.LOADED and epoch == self.cursor.epoch:
            return replace(self, chosen=epoch if self.ended else None)
        return self if epoch == self.start.epoch else Position(cursor=Cursor(epoch))

    def loaded(self, cursor: Cursor, *, ended: bool) -> "Position":
        """Transition: a saved position replaces this one; a pass in progress no longer counts."""
        return Position(Phase.LOADED, cursor, ended)
