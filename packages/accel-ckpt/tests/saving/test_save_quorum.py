"""Quorum of a save: which ranks take part, decided by the main rank."""

from datetime import timedelta

import pytest

from accel_ckpt.saving.save_quorum import SaveQuorum
from accel_state.errors import CheckpointError


@pytest.mark.ranks(2)
def test_without_the_main_process_the_others_say_so(rank: int) -> None:
    from accel_state.session import Session

    with Session.open(cpu=True) as session:
        found = SaveQuorum.of(session)
        assert found is not None
        found._patience = timedelta(seconds=0.2)
        if rank == 1:
            with pytest.raises(CheckpointError, match="rank 1 came to save and rank 0 did not"):
                found.missing(all_needed=False)
        session.wait_for_everyone()


class LaggingStore:
    """Store whose ``set`` returns at once, as a TCPStore's does: the server applies it before it answers a query.

    ``applied`` holds what other connections see.
    """

    def __init__(self, **applied: str) -> None:
        self.applied: dict[str, str] = dict(applied)
        self._sent: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self._sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        self.applied.update(self._sent)
        self._sent.clear()
        return all(key in self.applied for key in keys)

    def add(self, key: str, value: int) -> int:
        self.check([])
        self.applied[key] = str(int(self.applied.get(key, "0")) + value)
        return int(self.applied[key])


def test_ranks_see_the_decision_before_the_main_rank_goes_on() -> None:
    store = LaggingStore(**{"0/here/1": ""})
    quorum = SaveQuorum(store, 0, 0, 2, timedelta(seconds=5))  # type: ignore[arg-type]
    quorum.__dict__["_store"] = store
    assert quorum.missing(all_needed=True) == ()
    assert store.applied["0/missing"] == "[]"
    assert list(store.applied).index("rounds") < list(store.applied).index("0/missing")
