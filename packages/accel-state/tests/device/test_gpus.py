"""What is asked of the machine is read right, and its absence is no crash."""

import os

import pytest

from accel_state import check_cuda_fp8_capability, check_cuda_p2p_ib_support, get_gpu_info, set_numa_affinity
from accel_state.device.gpus import parse_cpu_list

TOOL = """#!/bin/sh
case "$1" in
*name*) printf '%s\\n' {names} ;;
*) echo {driver} ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a tool on the PATH that answers like nvidia-smi on another machine."""

    def install(names, driver):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(TOOL.format(names=" ".join(f"'{name}'" for name in names), driver=driver))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("names", "driver", "supported"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "545.23.06", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "545.23.06", True),
        (["NVIDIA H100"] * 8, "535.1", True),
        (["NVIDIA GeForce RTX 4090"] * 2, "unreadable", True),
    ],
)
def test_consumer_cards_under_an_old_driver_cannot_talk_directly(names, driver, supported, nvidia_smi):
    nvidia_smi(names, driver)
    assert get_gpu_info() == (names, len(names))
    assert check_cuda_p2p_ib_support() is supported


def test_a_machine_without_the_tool_is_said_to_be_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="nvidia-smi is not on the PATH"):
        get_gpu_info()
    assert check_cuda_p2p_ib_support()


def test_without_a_gpu_there_is_no_affinity_and_no_float8():
    if check_cuda_fp8_capability():
        pytest.skip("this machine has a GPU that computes float8")
    before = os.sched_getaffinity(0)
    set_numa_affinity(10_000)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("text", "cpus"), [("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11}), ("3", {3}), ("", set())])
def test_cpu_lists_of_the_kernel_are_read(text, cpus):
    assert parse_cpu_list(text) == cpus


def test_other_lists_are_refused():
    with pytest.raises(ValueError, match="cannot read 'a'"):
        parse_cpu_list("1,a")


@pytest.mark.parametrize(("count", "rank", "index"), [(1, 3, 0), (4, 3, 3), (0, 2, 2)])
def test_a_rank_that_is_shown_one_gpu_has_its_first(
    monkeypatch: pytest.MonkeyPatch, count: int, rank: int, index: int
) -> None:
    from accel_state.device import device
    from accel_state.device.gpus import gpu_of

    monkeypatch.setattr(device, "count_devices", lambda kind: count)
    assert gpu_of(rank) == index
