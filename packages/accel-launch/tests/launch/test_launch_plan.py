"""What the plan decides, with plain data: no process starts and no machine is looked at."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accel_launch.config import resolve_config
from accel_launch.launch import HostFacts, LaunchPlan, plan, read_host
from accel_launch.launch.multi_node.network import interface_to
from accel_state.errors import LaunchError

CPU = HostFacts(python="/py", num_cores=8, accelerator=None, num_accelerators=0)
GPUS = replace(CPU, accelerator="cuda", num_accelerators=4)
TWO_MACHINES = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


def planned(settings: dict[str, object], host: HostFacts = CPU, **env: str) -> LaunchPlan:
    return plan(resolve_config(settings, {}), ["train.py", "--lr", "1"], host, env=env)


@pytest.mark.parametrize(
    ("settings", "host", "count"),
    [
        ({}, CPU, 1),
        ({}, GPUS, 4),
        ({"cpu": True}, replace(GPUS, accelerator=None, num_accelerators=0), 1),
        ({"num_processes": 3}, CPU, 3),
        ({"num_processes": 2}, GPUS, 2),
        ({"gpu_ids": "1,3"}, GPUS, 2),
        ({"gpu_ids": "all"}, GPUS, 4),
        ({"multi_gpu": True}, GPUS, 4),
        ({"num_processes": 4} | TWO_MACHINES, CPU, 2),
        (TWO_MACHINES, GPUS, 4),
    ],
)
def test_number_of_processes_on_this_machine(settings: dict[str, object], host: HostFacts, count: int) -> None:
    assert len(planned(settings, host).processes) == count


def test_each_process_is_told_its_place() -> None:
    made = planned({"num_processes": 4, "machine_rank": 1, **TWO_MACHINES})
    places = [
        [process.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
        for process in made.processes
    ]
    assert places == [["2", "0", "4", "2", "1"], ["3", "1", "4", "2", "1"]]
    assert {process.env["MASTER_ADDR"] for process in made.processes} == {"10.0.0.1"}


def test_the_configuration_travels_as_one_document_with_origins() -> None:
    made = plan(resolve_config({}, {}, flags={"mixed_precision": "bf16"}), ["a.py"], CPU, env={})
    child = resolve_config({}, made.processes[0].env)
    assert child.mixed_precision == "bf16"
    assert str(child.origin("mixed_precision")) == "flag --mixed_precision"


def test_the_attempt_of_an_outer_launcher_is_not_that_of_an_inner_process() -> None:
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7", "ACCEL_LAUNCHER_PID": "7"}
    (process,) = planned({"num_processes": 1}, **outer).processes
    assert process.environment({**outer, "HOME": "/root"}).keys() - process.env.keys() == {"HOME"}


def test_the_log_level_reaches_loggers_made_before_any_accelerator() -> None:
    assert planned({"log_level": "debug"}).processes[0].env["ACCEL_LOG_LEVEL"] == "debug"


@pytest.mark.parametrize(
    ("settings", "argv"),
    [
        ({}, ("/py", "train.py", "--lr", "1")),
        ({"module": True}, ("/py", "-m", "train.py", "--lr", "1")),
        ({"no_python": True}, ("train.py", "--lr", "1")),
        ({"compat": True, "module": True}, ("/py", "-m", "accel.compat", "-m", "train.py", "--lr", "1")),
    ],
)
def test_one_process_replaces_the_launcher(settings: dict[str, object], argv: tuple[str, ...]) -> None:
    made = planned(settings)
    assert made.direct
    assert made.processes[0].argv == argv


@pytest.mark.parametrize(("given", "port"), [({}, 29500), ({"main_process_port": 4000}, 4000)])
def test_machines_that_were_given_no_port_meet_at_the_usual_one(given: dict[str, object], port: int) -> None:
    made = planned({"num_machines": 2, "num_processes": 2, "main_process_ip": "10.0.0.1", **given})
    assert made.main_port == port
    assert planned({"num_processes": 2}).main_port == 0


@pytest.mark.parametrize("settings", [{"max_restarts": 1}, {"prefix_output": True}, {"log_dir": "logs"}])
def test_one_process_that_needs_watching_is_watched(settings: dict[str, object]) -> None:
    assert not planned(settings).direct


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "script"),
        ({"module": True}, "module"),
        ({"no_python": True}, "command"),
        ({"compat": True}, "compat-script"),
        ({"compat": True, "module": True}, "compat-module"),
    ],
)
def test_watched_processes_run_the_program_through_our_worker(settings: dict[str, object], kind: str) -> None:
    argv = planned({"num_processes": 2, **settings}).processes[1].argv
    assert argv == ("/py", "-P", "-m", "accel_launch.launch.child_main", kind, "train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("settings", "env", "threads"),
    [
        ({"num_processes": 2}, {}, "4"),
        ({"num_processes": 3}, {}, "2"),
        ({"num_processes": 16}, {}, "1"),
        ({"num_processes": 2}, {"OMP_NUM_THREADS": "7"}, None),
        ({"num_processes": 2, "num_cpu_threads_per_process": 3}, {"OMP_NUM_THREADS": "7"}, "3"),
        ({}, {}, None),
    ],
)
def test_cores_are_shared_out_unless_somebody_said_otherwise(
    settings: dict[str, object], env: dict[str, str], threads: str | None
) -> None:
    assert planned(settings, **env).processes[0].env.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("env", "visible"),
    [({}, "1,3"), ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "5,7"), ({"CUDA_VISIBLE_DEVICES": ""}, "1,3")],
)
def test_chosen_accelerators_count_what_the_launcher_sees(env: dict[str, str], visible: str) -> None:
    assert planned({"gpu_ids": "1,3"}, GPUS, **env).processes[0].env["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("env", "visible"),
    [
        pytest.param({}, {"CUDA": "1,3"}, id="none"),
        pytest.param({"HIP": "4,5,6,7"}, {"CUDA": "1,3", "HIP": "5,7"}, id="HIP"),
        pytest.param({"HIP": "4,5,6,7", "CUDA": "0"}, {"HIP": "5,7"}, id="HIP, and CUDA passed over"),
        pytest.param({"ROCR": "4,5,6,7"}, {"CUDA": "1,3", "HIP": "1,3"}, id="ROCR, from which HIP chooses"),
        pytest.param({"ROCR": "4,5,6,7", "CUDA": "4,5,6,7"}, {"CUDA": "5,7", "HIP": "1,3"}, id="all of Slurm's"),
    ],
)
def test_chosen_accelerators_of_amd_are_those_that_the_launcher_sees(
    env: dict[str, str], visible: dict[str, str]
) -> None:
    made = planned({"gpu_ids": "1,3"}, GPUS, **{f"{name}_VISIBLE_DEVICES": value for name, value in env.items()})
    chosen = {name: value for name, value in made.processes[0].env.items() if name.endswith("VISIBLE_DEVICES")}
    assert chosen == {f"{name}_VISIBLE_DEVICES": value for name, value in visible.items()}


@pytest.mark.parametrize(
    ("settings", "host", "words"),
    [
        ({"num_processes": 8}, GPUS, ("8 processes", "4 accelerators (cuda)", "num_processes 4", "cpu")),
        ({"num_processes": 16} | TWO_MACHINES, GPUS, ("8 processes", "num_processes 8 would fit")),
        ({"multi_gpu": True}, CPU, ("multi_gpu", "offers 0")),
        ({"multi_gpu": True, "num_processes": 1}, GPUS, ("2 or more processes",)),
        ({"multi_gpu": True, "cpu": True}, GPUS, ("cpu and multi_gpu",)),
        ({"module": True, "no_python": True}, CPU, ("module and no_python",)),
        ({"num_machines": 2, "machine_rank": 2}, CPU, ("machine_rank is 2", "expected 0 to 1")),
        ({"machine_rank": 1}, CPU, ("machine_rank is 1", "expected 0 to 0")),
        ({"num_machines": 2}, CPU, ("2 machines need main_process_ip",)),
        ({"num_machines": 2, "main_process_ip": "h", "main_process_port": 0}, CPU, ("main_process_port is 0", "29500")),
        ({"num_processes": 3} | TWO_MACHINES, CPU, ("3 cannot be shared by 2 machines", "nearest that can: 2")),
        ({"num_processes": 1} | TWO_MACHINES, CPU, ("1 cannot be shared by 2 machines", "nearest that can: 2")),
        ({"gpu_ids": "0,9"}, GPUS, ("'0,9'", "0,1,2,3")),
        ({"gpu_ids": "1,1"}, GPUS, ("'1,1'", "different")),
        ({"gpu_ids": "0"}, CPU, ("no accelerator",)),
        ({"gpu_ids": "0"}, replace(GPUS, accelerator="odd"), ("odd devices",)),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_would(
    settings: dict[str, object], host: HostFacts, words: tuple[str, ...]
) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(settings, host)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("origin", ["file", "variable"])
def test_devices_of_other_launches_are_passed_over_on_the_cpu(origin: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpu_ids: 0,1\nnum_processes: 2\n" if origin == "file" else "num_processes: 2\n")
    env = {} if origin == "file" else {"ACCEL_GPU_IDS": "0,1"}
    config = resolve_config({"cpu": True}, env, file)
    assert config.gpu_ids == "0,1"
    made = plan(config, ["train.py"], replace(GPUS, accelerator=None, num_accelerators=0), env={})
    assert len(made.processes) == 2
    with pytest.raises(LaunchError, match="gpu_ids is '0,1'"):
        planned({"cpu": True, "gpu_ids": "0,1"})


def test_a_plan_is_plain_data_as_json() -> None:
    data = json.loads(json.dumps(planned({"num_processes": 2, "main_process_port": 29511}).to_json()))
    assert data["main_process"] == {"address": "127.0.0.1", "port": 29511}
    assert [process["env"]["MASTER_PORT"] for process in data["processes"]] == ["29511", "29511"]


@pytest.mark.parametrize(
    ("env", "found", "written"),
    [({}, "eth1", "eth1"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "eth1", None), ({}, None, None)],
)
def test_gloo_talks_in_the_network_that_the_machines_share(
    env: dict[str, str], found: str | None, written: str | None
) -> None:
    made = planned(TWO_MACHINES, replace(CPU, interface=found), **env).processes[0].env
    assert made.get("GLOO_SOCKET_IFNAME") == written


@pytest.mark.parametrize(
    ("given", "asked"), [({}, True), ({"same_network": False}, False), ({"num_machines": 1}, False)]
)
def test_the_shared_network_is_looked_for_where_there_is_one(given: dict[str, object], asked: bool) -> None:
    many = {"num_machines": 2, "cpu": True, "main_process_ip": "203.0.113.1"} | given
    expected = interface_to("203.0.113.1") if asked else None
    assert read_host(resolve_config(many, {})).interface == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_the_loopback_and_unknown_hosts_lead_to_no_network(address: str) -> None:
    assert interface_to(address) is None
