"""Save quorum: the ranks that take part in a save, found through the group's store before any collective.

Many scripts have ``if accelerator.is_main_process: accelerator.save_state(...)``, where a collective would hang. So
each rank writes a key to the store when it enters ``save_state``, and the main rank decides: all are present, or it
saves without the absent ranks. It waits for a rank until the watchdog reports that the rank has ended, is stopped, or
has gone past ``save_state``; a timeout decides only if the watchdog has no information. Once ranks were absent, the
main rank does not wait for them again, unless one of them enters ``save_state`` after all.

Writing the key is not a collective: a rank that went past ``save_state`` may be in its next collective already, and
all ranks must number collectives alike.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import CheckpointError
from accel_state.watchdog.decorator import active, recorded

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_state.session import Session
    from accel_state.watchdog.diagnosis import SourcePlace

_LOG = logging.getLogger(__name__)
_PREFIX = "accel/save_quorum"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-4, 5e-3
_SEARCH_EVERY = 0.1
GRACE = 60.0
"""Seconds for which the main rank waits for an idle rank, or for any rank that the save does not need."""
AHEAD_GRACE = 5.0
"""Seconds for which the main rank waits for a rank that is ahead of it, and so has probably passed ``save_state``."""


@final
class SaveQuorum:
    """Save quorum of one Accelerator on one rank.

    Args:
        store: shared by the ranks.
        number: index of this Accelerator among those of the group; equal on all ranks, which make them in the same
            order.
        patience: time for which a rank waits for the main rank; the timeout of collectives.
    """

    def __init__(self, store: "Store", number: int, rank: int, size: int, patience: timedelta) -> None:
        self._shared, self._number = store, number
        self._rank, self._size, self._patience = rank, size, patience
        self._round = 0
        self._missing: tuple[int, ...] = ()
        self._late = 0
        self.places: Mapping[int, SourcePlace] = {}
        """Positions of the other ranks in the source code, as far as the watchdog knows them."""

    @classmethod
    def of(cls, session: "Session") -> "SaveQuorum | None":
        """Returns the quorum of a new Accelerator; None with one rank."""
        if session.group is None or session.timeout is None or session.world_size == 1:
            return None
        store: Store = session.group.get_group_store()
        number = store.add(f"{_PREFIX}/{session.rank}", 1)
        return cls(store, number, session.rank, session.world_size, session.timeout)

    @cached_property
    def _store(self) -> "Store":
        """Own connection with own keys, opened by the first save, because many runs never save."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        own: Any = self._shared.clone()  # type: ignore[attr-defined]
        return PrefixStore(f"{_PREFIX}/{self._number}", own)

    def missing(self, *, all_needed: bool) -> tuple[int, ...]:
        """Returns the ranks that are absent from this save; the same answer on all ranks, however late they call.

        With ``all_needed``, an absent rank is an error, so a busy rank is waited for as in any collective.

        Raises:
            CheckpointError: the main rank is absent.
        """
        return self._decide(all_needed=all_needed) if self._rank == 0 else self._ask()

    def missing_but_for(self, reason: str | None) -> tuple[int, ...]:
        """Like ``missing``, if ``reason`` is None; otherwise ``reason`` says why the save needs every rank.

        Raises:
            CheckpointError: needed ranks are absent; names the ranks, and their positions in the source code.
        """
        missing = self.missing(all_needed=reason is not None)
        if not missing or reason is None:
            return missing
        absent = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        places = "".join(f"\n  {place.text}" for rank, place in self.places.items() if rank in missing)
        raise CheckpointError(
            f"{absent} did not come to save_state, and it cannot do without them: {reason}. Call it on all "
            f"processes, not under `if accelerator.is_main_process:`{places}"
        )

    def _decide(self, *, all_needed: bool) -> tuple[int, ...]:
        late = self._store.add("late", 0)
        waiting = [rank for rank in range(1, self._size) if rank not in self._missing or late > self._late]
        self._late = late
        start, said = time.monotonic(), False
        for _ in self._moments(self._patience.total_seconds()):
            waiting = [rank for rank in waiting if not self._store.check([self._note(rank)])]
            waited = time.monotonic() - start
            if all(self._stays_away(rank, waited, all_needed=all_needed) for rank in waiting):
                break
            if waited > AHEAD_GRACE and not said:
                said = True
                places = [self.places[rank].text if rank in self.places else f"rank {rank}" for rank in waiting]
                _LOG.warning("save_state on rank 0 waits for:\n  %s", "\n  ".join(places))
        here = {rank for rank in range(1, self._size) if self._store.check([self._note(rank)])}
        self._missing = tuple(rank for rank in range(1, self._size) if rank not in here)
        decision = f"{self._round}/missing"
        self._round += 1
        self._store.set("rounds", str(self._round))  # first, because an absent rank reads it after the decision
        self._store.set(decision, json.dumps(self._missing))
        # A set returns before the server has applied it. A rank that sees this one in a later operation, and finds no
        # decision in the store, concludes that there is none.
        self._store.check([decision])
        return self._missing

    def _stays_away(self, rank: int, waited: float, *, all_needed: bool) -> bool:
        """Whether the main rank stops waiting for a rank that has written no key after ``waited`` seconds."""
        grace = min(GRACE, self._patience.total_seconds() / 2)
        place = self.places.get(rank)
        if place is None:
            return waited >= grace
        idle = min(place.idle, waited) if all_needed else waited
        limit = min(AHEAD_GRACE, grace) if place.ahead else grace
        return place.passed or idle >= limit or (place.ahead and waited >= grace)

    @recorded("save_state", shared=False)
    def _ask(self) -> tuple[int, ...]:
        self._store.set(self._note(self._rank), "")
        decision = f"{self._round}/missing"
        came = f"rank {self._rank} came to save and rank 0 did not"
        remedy = "call save_state on all processes, or on the main one at least"
        try:
            for _ in self._moments(self._patience.total_seconds()):
                place = self.places.get(0)
                if self._store.check([decision]):
                    break
                if place is not None and place.passed:  # and had passed before the store was seen to hold no decision
                    raise CheckpointError(f"{came}: {place.text}; {remedy}")
            else:
                raise CheckpointError(f"{came} within {self._patience}; {remedy}")
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{came}: the store that the ranks share is gone; {remedy}") from error
        missing = tuple(json.loads(self._store.get(decision)))
        if self._rank in missing:  # continues in step with the main rank, which waits for this rank again
            self._round = int(self._store.get("rounds"))
            self._store.add("late", 1)
        else:
            self._round += 1
        return missing

    def _moments(self, patience: float) -> Iterator[None]:
        """Yields at polling times, for ``patience`` seconds; updates ``places`` meanwhile."""
        self.places = {}
        now = time.monotonic()
        deadline, search, pause = now + patience, now, _SHORTEST_PAUSE
        while True:
            yield
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= search:
                watchdog = active()
                self.places = {} if watchdog is None else watchdog.places()
                search = now + _SEARCH_EVERY
                continue
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note(self, rank: int) -> str:
        return f"{self._round}/here/{rank}"
