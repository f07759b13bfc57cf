"""Plan of one rank of many, with plain data: no process starts."""

from pathlib import Path

import pytest

from accel_launch.config import resolve_config
from accel_launch.launch import HostFacts
from accel_launch.launch.one_rank import plan_one_rank
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.errors import LaunchError

CPU = HostFacts(python="/py", num_cores=8, accelerator=None, num_accelerators=0)


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.touch()
    return [str(script)]


@pytest.mark.parametrize(("given", "port"), [({}, DEFAULT_PORT), ({"main_process_port": 1234}, 1234)])
def test_the_process_has_every_variable_of_a_rank(given: dict[str, int], port: int, program: list[str]) -> None:
    config = resolve_config({}, {}, flags={"num_machines": 2, **given})
    process = plan_one_rank(config, program, CPU, env={}, world_size=8)
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [process.env[name] for name in names] == ["0", "8", "4", "2", "127.0.0.1", str(port)]


def test_another_rank_has_its_place_on_its_node(program: list[str]) -> None:
    config = resolve_config({}, {}, flags={"num_machines": 2})
    process = plan_one_rank(config, program, CPU, env={}, rank=6, world_size=8)
    names = ("RANK", "ROLE_RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [process.env[name] for name in names] == ["6", "6", "2", "1", "8", "4"]
    assert (process.rank, process.local_rank, process.argv[4:6]) == (6, 2, ("6", "8"))


@pytest.mark.parametrize(("rank", "nearest"), [(8, 7), (-1, 0)])
def test_a_rank_that_does_not_exist_is_refused_with_the_nearest_one(
    rank: int, nearest: int, program: list[str]
) -> None:
    with pytest.raises(LaunchError, match=f"rank {rank}: ranks of 8 are 0 to 7; nearest: {nearest}"):
        plan_one_rank(resolve_config({}, {}), program, CPU, env={}, rank=rank, world_size=8)


def test_the_profiler_is_silent_unless_its_level_is_given(program: list[str]) -> None:
    for env, level in (({}, "6"), ({"KINETO_LOG_LEVEL": "0"}, "0")):
        process = plan_one_rank(resolve_config({}, {}), program, CPU, env=env, world_size=8)
        assert process.environment(env)["KINETO_LOG_LEVEL"] == level


def test_settings_of_the_supervisor_are_refused_from_flags_and_without_effect_from_variables(
    program: list[str],
) -> None:
    kept = resolve_config({}, {"ACCEL_MAX_RESTARTS": "3"})
    assert kept.max_restarts == 3
    plan_one_rank(kept, program, CPU, env={}, world_size=8)
    with pytest.raises(LaunchError, match="as 8 and max_restarts: one process has no supervisor; nearest: omit it"):
        plan_one_rank(resolve_config({"max_restarts": 3}, {}), program, CPU, env={}, world_size=8)
