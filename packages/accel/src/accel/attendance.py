"""Who comes to a save: found out through the group's store, before anything waits for everybody.

Many scripts say ``if accelerator.is_main_process: accelerator.save_state(...)``. A collective would hang there. So each
rank leaves a note in the store when it comes, and the main one decides: everybody is here, or it goes on without those
that are missing. It waits for them the first time, and no longer than until the hang doctor sees them in a collective
that comes later; once some have stayed away it does not wait again, unless one of them came after all.

Coming is no collective: a rank that did not come may be in its next one already, and numbers it as the others do.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from accel_state.doctor.active import active, recorded
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_state.session import Session

_PREFIX = "accel/attendance"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-4, 5e-3
_SEARCH_EVERY = 0.1
GRACE = 5.0
"""Seconds for which the main rank waits for the others where it could do without them, once."""
SHARDED_GRACE = 60.0
"""Seconds for which it waits where it could not, before it says who is missing."""


@final
class Attendance:
    """The saves of one Accelerator; made by each rank for itself, asked by those that come.

    Args:
        store: shared by the ranks, under keys that nobody else uses.
        patience: how long a rank waits for the main one, as long as for any collective.
    """

    def __init__(self, store: "Store", rank: int, size: int, patience: timedelta) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience
        self._round = 0
        self._missing: tuple[int, ...] = ()
        self._late = 0
        self.places: Mapping[int, str] = {}
        """Where ranks are that cannot come any more, as far as the hang doctor knows them."""

    @classmethod
    def of(cls, session: "Session") -> "Attendance | None":
        """That of a session's ranks; None where there is one only."""
        if session.group is None or session.timeout is None or session.world_size == 1:
            return None
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store: Any = session.group.get_group_store().clone()  # type: ignore[attr-defined]
        number = store.add(f"{_PREFIX}/{session.rank}", 1)  # all ranks make theirs in the same order
        return cls(PrefixStore(f"{_PREFIX}/{number}", store), session.rank, session.world_size, session.timeout)

    def missing(self, *, grace: float) -> tuple[int, ...]:
        """The ranks that did not come to this save; the same answer on all that ask, however late.

        ``grace`` is for how many seconds the main rank waits where it has no reason to think that it is alone.

        Raises:
            CheckpointError: the main rank does not come.
        """
        return self._decide(grace) if self._rank == 0 else self._ask()

    def _decide(self, grace: float) -> tuple[int, ...]:
        late = self._store.add("late", 0)
        waiting = [rank for rank in range(1, self._size) if rank not in self._missing or late > self._late]
        self._late = late
        for _ in self._moments(grace):
            waiting = [rank for rank in waiting if not self._store.check([self._note(rank)])]
            if all(rank in self.places for rank in waiting):
                break
        here = {rank for rank in range(1, self._size) if self._store.check([self._note(rank)])}
        self._missing = tuple(rank for rank in range(1, self._size) if rank not in here)
        self._store.set(f"{self._round}/missing", json.dumps(self._missing))
        self._round += 1
        self._store.set("rounds", str(self._round))
        return self._missing

    @recorded("save_state", shared=False)
    def _ask(self) -> tuple[int, ...]:
        self._store.set(self._note(self._rank), "")
        decision = f"{self._round}/missing"
        came = f"rank {self._rank} came to save and rank 0 did not"
        remedy = "call save_state on all processes, or on the main one at least"
        try:
            for _ in self._moments(self._patience.total_seconds()):
                gone = self.places.get(0)
                if self._store.check([decision]):
                    break
                if gone is not None:  # and was so before it was seen that it has decided nothing
                    raise CheckpointError(f"{came}: {gone}; {remedy}")
            else:
                raise CheckpointError(f"{came} within {self._patience}; {remedy}")
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{came}: the store that the ranks share is gone; {remedy}") from error
        missing = tuple(json.loads(self._store.get(decision)))
        if self._rank in missing:  # from now on in step with the main rank, which is told that this one comes
            self._round = int(self._store.get("rounds"))
            self._store.add("late", 1)
        else:
            self._round += 1
        return missing

    def _moments(self, patience: float) -> Iterator[None]:
        """Moments to look for notes, for ``patience`` seconds; keeps ``places`` up to date meanwhile."""
        self.places = {}
        now = time.monotonic()
        deadline, search, pause = now + patience, now, _SHORTEST_PAUSE
        while True:
            yield
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= search:
                doctor = active()
                self.places = {} if doctor is None else doctor.passed_by()
                search = now + _SEARCH_EVERY
                continue
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note(self, rank: int) -> str:
        return f"{self._round}/here/{rank}"
