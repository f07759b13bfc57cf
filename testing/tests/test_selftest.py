"""``accel test`` tries each thing, reports what works, and ends with 1 where something that is there does not."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from accel_testing.cli import selftest
from accel_testing.cli.selftest import Trial, trials_of


@pytest.mark.slow
def test_what_is_here_works() -> None:
    trials = list(selftest._training("cpu", ["single", "ddp:2"], quick=True))
    assert [trial.what for trial in trials] == ["training single/fp32", "training ddp:2/fp32"]
    assert all(trial.ok for trial in trials), trials


@pytest.mark.slow
def test_jobs_are_launched_saved_and_resumed() -> None:
    *_, saved, resumed = trials_of(cpu=True, quick=True)
    assert (saved.ok, resumed.ok) == (True, True), (saved, resumed)


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_tells_whether_all_that_is_there_works(
    ok: bool | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trials(*, cpu: bool, quick: bool) -> Iterator[Trial]:
        yield Trial("cpu", "training", ok, 1.0, "a remark")

    monkeypatch.setattr(selftest, "trials_of", trials)
    done = CliRunner().invoke(selftest.test, ["--json"], standalone_mode=False)
    assert done.return_value == status
    assert json.loads(done.output)[0]["ok"] is ok
