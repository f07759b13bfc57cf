"""Ranks that a launcher starts serve as forked ones do."""

import os
import signal

import pytest

from accel_testing.errors import RankDied, RankError
from accel_testing.ranks.pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accel", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_of_a_launcher_are_kept_and_replaced(launcher: str) -> None:
    with RankPool(2, launcher=launcher) as pool:
        assert pool.run(lambda: os.environ["RANK"]) == ["0", "1"]
        first = pool.run(os.getpid)
        assert pool.run(os.getpid) == first == list(pool.pids)
        starters, hashes = zip(*pool.run(lambda: (os.getppid(), hash("parameter"))), strict=True)
        assert len(set(starters)) == 1
        assert os.getpid() not in starters
        assert len(set(hashes)) == 2
        with pytest.raises(RankDied, match="rank 1 ended"):
            pool.run(lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL))
        assert not {*pool.run(os.getpid)} & {*first}


@pytest.mark.slow
def test_hash_seeds_of_launched_ranks_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TESTING_HASH_SEED", "11")
    seen = []
    for launcher in (None, "torchrun"):
        with RankPool(2, launcher=launcher) as pool:
            seen.append(pool.run(lambda: hash("parameter")))
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_ranks_that_cannot_start_are_an_error_with_their_traceback() -> None:
    with (
        RankPool(2, launcher="torchrun", preload=["no_such_module"]) as pool,
        pytest.raises(RankError, match=r"(?s)'torchrun' started 0 of 2 ranks.*No module named 'no_such_module'"),
    ):
        pool.run(os.getpid)
