"""Cursor: the position of a run in its data, independent of processes, workers and batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import DataStateError

if TYPE_CHECKING:
    from accel_state.parallelism.config import DataShard

EPOCH_KEY = "epoch"
SAMPLES_KEY = "samples"


def as_integer(value: object) -> int | None:
    """Returns ``value`` as an int; None if it is not an integer. numpy's integers are, booleans are not."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


@final
@dataclass(frozen=True, slots=True)
class Cursor:
    """``samples`` positions of epoch ``epoch`` have been delivered, counted over all ranks.

    Delivered means yielded to the user's loop, not read ahead by a worker. Padding of a last batch does not count. The
    next sample is the one at position ``samples`` of the epoch's order, on whichever rank.
    """

    epoch: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        if type(self.epoch) is int and type(self.samples) is int and self.epoch >= 0 and self.samples >= 0:
            return
        for name in (EPOCH_KEY, SAMPLES_KEY):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DataStateError(f"a loader's {name} is {value!r}; it must be a whole number of at least 0")

    def advanced(self, samples: int) -> "Cursor":
        """Returns the cursor ``samples`` positions later in this epoch."""
        return Cursor(self.epoch, self.samples + samples)

    def state_dict(self) -> dict[str, int]:
        """Returns two JSON numbers."""
        return {EPOCH_KEY: self.epoch, SAMPLES_KEY: self.samples}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Cursor":
        """Parses the result of ``state_dict``; raises ``DataStateError`` naming a missing or malformed value."""
        missing = [name for name in (EPOCH_KEY, SAMPLES_KEY) if name not in state]
        if missing:
            raise DataStateError(
                f"a loader's state has no {' and no '.join(missing)}; it holds {', '.join(sorted(state)) or 'nothing'}"
            )
        return cls(state[EPOCH_KEY], state[SAMPLES_KEY])


@final
@dataclass(frozen=True, slots=True)
class Window:
    """Index of a micro-batch in its global batch.

    ``index`` counts from 0 to ``size`` - 1. ``share`` is the factor on the mean loss of this rank's micro-batch with
    which the average over ranks of the sum over the window is the mean over the global batch.
    """

    index: int
    size: int
    share: float


@final
@dataclass(frozen=True, slots=True)
class Step:
    """Facts after one batch has been delivered on every rank.

    ``real_counts`` has one entry per data rank: the number of rows of its batch that are samples of this epoch (the
    rest is padding), or -1 for a rank without a batch in this step. None: unknown, or no padding. ``rows`` is the
    number of rows of this rank's batch, padding included; None: unknown, or no padding. A batch that the dataset has
    made itself (``batch_size=None``) counts as one row. ``private`` is the state that
    an opaque dataset of this rank needs to continue here.
    """

    cursor: Cursor
    real_counts: tuple[int, ...] | None = None
    rows: int | None = None
    window: Window | None = None
    private: Mapping[str, Any] | None = None


@final
@dataclass(frozen=True, slots=True)
class Share:
    """Result of a user's sharding function for one rank in one step.

    ``positions`` are positions of the epoch's order, the first ``real`` of them (None: all) new ones, the rest padding.
    ``advance`` is the number of positions that the step takes over all ranks; it must be equal on every rank.
    """

    positions: Sequence[int]
    advance: int
    real: int | None = None


ShardFunction = Callable[[Cursor, "DataShard"], Share | None]
"""Returns the positions that a rank reads in the step that begins at a cursor; None at the end of the epoch."""
