"""The position of a loader in its data: a value with named states, and the transitions between them.

``Position`` knows nothing of batches, ranks or processes. A loader holds one, applies a transition for each event of
its loop, and saves ``cursor`` and ``ended``. Because a position is a value, a load that is refused is undone by putting
the value from before back.

======== ========================================= ==================================================
state    meaning                                   the next pass begins
======== ========================================= ==================================================
BEFORE   no pass is under way                      at ``cursor``
INSIDE   a pass has delivered up to ``cursor``     in the next epoch
LEFT     the loop broke out of a pass at ``cursor`` in the next epoch, so with another order
LOADED   ``cursor`` was saved by this or another   at ``cursor``; in the next epoch if the epoch had ended
         run, and no pass has begun since
======== ========================================= ==================================================

A run that resumes goes on at ``cursor`` in every state: what was saved INSIDE or LEFT is LOADED there.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import final

from accel_data.order.cursor import Cursor


class Phase(Enum):
    """The state of a position."""

    BEFORE = "before a pass"
    INSIDE = "inside a pass"
    LEFT = "left inside a pass"
    LOADED = "loaded"


@final
@dataclass(frozen=True, slots=True)
class Position:
    """The position of one loader.

    Attributes:
        phase: the state.
        cursor: epoch, and samples of it that were delivered on all ranks together.
        ended: nothing of the epoch is left to deliver, though the loop has not returned for its end yet. A run that
            resumes here goes on with the next epoch.
        chosen: the epoch that ``set_epoch`` chose, INSIDE for the next pass (None: the one after this), LOADED after an
            epoch had ended: then this very epoch, of which nothing is left.
        idle: INSIDE, nothing was delivered since another pass began inside this one, or an epoch was chosen.
    """

    phase: Phase = Phase.BEFORE
    cursor: Cursor = field(default_factory=Cursor)
    ended: bool = False
    chosen: int | None = None
    idle: bool = False

    @property
    def start(self) -> Cursor:
        """Where the next pass begins that is not nested in the one under way."""
        if self.phase is Phase.BEFORE or (self.phase is Phase.LOADED and (self.spent or not self.ended)):
            return self.cursor
        return Cursor(self.cursor.epoch + 1 if self.chosen is None else self.chosen)

    @property
    def epoch(self) -> int:
        """The epoch being read, or the next to be read."""
        return self.cursor.epoch if self.phase is Phase.INSIDE else self.start.epoch

    @property
    def is_loaded(self) -> bool:
        """Whether it was loaded, and no pass has begun since."""
        return self.phase is Phase.LOADED

    @property
    def spent(self) -> bool:
        """Whether the next pass is empty: of the epoch that the script named nothing is left."""
        return self.phase is Phase.LOADED and self.ended and self.chosen is not None

    @property
    def nests(self) -> bool:
        """Whether a pass that begins now is nested in the one under way.

        A loop that holds two passes cannot be distinguished from one that abandoned the first and holds on to its
        iterator. So the first is taken to be abandoned once a second pass begins without a delivery of the first
        in between, or once an epoch was chosen since its last delivery.
        """
        return self.phase is Phase.INSIDE and not self.idle

    def started(self, cursor: Cursor) -> "Position":
        """A pass begins at ``cursor``."""
        return Position(Phase.INSIDE, cursor)

    def nested(self) -> "Position":
        """A pass begins inside the one under way, which it does not disturb."""
        return replace(self, idle=True)

    def delivered(self, cursor: Cursor, *, ended: bool) -> "Position":
        """The pass under way has delivered up to ``cursor``, which is the last of the epoch if ``ended``."""
        return replace(self, cursor=cursor, ended=ended, idle=False)

    def left(self) -> "Position":
        """The loop broke out of the pass, or failed in it."""
        return replace(self, phase=Phase.LEFT, idle=False)

    def given_up(self) -> "Position":
        """The rest of a pass that was left is not to be read by a run that resumes, either (an evaluation)."""
        return self if self.phase is not Phase.LEFT else Position(cursor=self.start)

    def finished(self, *, advances: bool = True) -> "Position":
        """The pass under way has ended. An epoch without any samples never advances."""
        epoch = self.cursor.epoch + 1 if advances else self.cursor.epoch
        return Position(cursor=Cursor(epoch if self.chosen is None else self.chosen))

    def sought(self, cursor: Cursor) -> "Position":
        """The next pass begins at ``cursor``."""
        return Position(cursor=cursor)

    def with_epoch(self, epoch: int) -> "Position":
        """``set_epoch``: the next pass reads ``epoch``.

        A loaded position in ``epoch`` is kept, so that a script which counts epochs resumes inside the one that it was
        saved in; if that had ended, the pass that the script makes of it is empty.
        """
        if self.phase is Phase.INSIDE:
            same = epoch == self.cursor.epoch
            return replace(self, chosen=None if same else epoch, idle=self.idle or not same)
        if self.phase is Phase.LOADED and epoch == self.cursor.epoch:
            return replace(self, chosen=epoch if self.ended else None)
        return self if epoch == self.start.epoch else Position(cursor=Cursor(epoch))

    def loaded(self, cursor: Cursor, *, ended: bool) -> "Position":
        """A saved position takes the place of this one; a pass that is under way counts no more."""
        return Position(Phase.LOADED, cursor, ended)
