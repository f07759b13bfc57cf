"""NCCL's flight recorder under a launcher: where it dumps at a timeout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_launch.launch.supervisor.supervisor import attempt_env

DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def added(log_dir: str | None) -> list[str | None]:
    plan: Any = SimpleNamespace(config=SimpleNamespace(log_dir=log_dir, max_restarts=2))
    env = attempt_env(plan, 1, "run")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "1"
    return [env.get(name) for name in DUMPS]


def test_nccl_dumps_beside_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DUMPS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / "logs" / "attempt_1" / "nccl_flight_record_rank_")
    assert added("logs") == ["1", place, place]
    assert added(None) == [None, None, None]
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    assert added("logs") == [None, place, place]


@pytest.mark.parametrize("name", DUMPS[1:])
def test_a_place_that_the_user_names_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/elsewhere/rank_")
    assert added("logs") == [None, None, None]
