"""Variables are read as what they mean, and changed only for a while."""

import asyncio
import logging
import os
import unittest

import pytest

from accel_state import (
    CPUInformation,
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_current_device_type,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from accel_state.environment import available_cpus, usable_cpus


@pytest.mark.parametrize("text", ["y", "YES", "t", "True", "on", "1"])
def test_true_words(text):
    assert str_to_bool(text) == 1
    assert str_to_bool(text, to_bool=True) is True


@pytest.mark.parametrize("text", ["n", "NO", "f", "False", "off", "0"])
def test_false_words(text):
    assert str_to_bool(text) == 0
    assert str_to_bool(text, to_bool=True) is False


@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="invalid truth value"):
        str_to_bool(text)


def test_the_first_number_counts():
    with patch_environment(x_one="-1", x_two="3", x_three="4"):
        assert get_int_from_env(["X_MISSING", "X_ONE", "X_TWO", "X_THREE"], 9) == 3
        assert get_int_from_env(["X_MISSING"], 9) == 9


def test_flags_and_choices_have_defaults():
    with patch_environment(x_flag="yes", x_choice="bf16"):
        assert parse_flag_from_env("X_FLAG") is True
        assert parse_flag_from_env("X_MISSING") is False
        assert parse_flag_from_env("X_MISSING", True) is True
        assert parse_choice_from_env("X_CHOICE") == "bf16"
        assert parse_choice_from_env("X_MISSING") == "no"


def test_a_patch_nests_and_is_undone_after_an_error():
    before = dict(os.environ)
    with patch_environment(x_a=1), patch_environment(x_a=2, x_b=True):
        assert (os.environ["X_A"], os.environ["X_B"]) == ("2", "True")
    assert dict(os.environ) == before
    with pytest.raises(KeyError), patch_environment(x_a=1):
        raise KeyError
    assert dict(os.environ) == before


def test_a_cleared_environment_comes_back():
    before = dict(os.environ)

    def change_and_fail():
        with clear_environment():
            assert not os.environ
            os.environ["X_NEW"] = "1"
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert dict(os.environ) == before


def leave_traces():
    os.environ["ACCELERATE_OLD"] = "changed"
    os.environ["ACCELERATE_NEW"] = "1"
    os.environ["X_OTHER"] = "kept"


@pytest.fixture
def traces(monkeypatch):
    monkeypatch.setenv("ACCELERATE_OLD", "before")
    monkeypatch.setenv("X_OTHER", "before")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)

    def check():
        assert os.environ["ACCELERATE_OLD"] == "before"
        assert "ACCELERATE_NEW" not in os.environ
        assert os.environ["X_OTHER"] == "kept"

    return check


def test_a_purged_function_leaves_no_trace(traces):
    purge_accelerate_environment(leave_traces)()
    traces()


def test_a_purged_coroutine_leaves_no_trace(traces):
    @purge_accelerate_environment
    async def leave():
        leave_traces()

    asyncio.run(leave())
    traces()


def test_a_purged_class_passes_the_promise_to_its_subclasses(traces):
    @purge_accelerate_environment
    class Base(unittest.TestCase):
        def test_base(self):
            leave_traces()

    class Child(Base):
        def test_child(self):
            leave_traces()

    for case in (Base("test_base"), Child("test_base"), Child("test_child")):
        assert case.run().wasSuccessful()
        traces()


def test_a_class_keeps_its_own_hook_for_subclasses():
    seen = []

    @purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, mark, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(mark)

    class Child(Base, mark=7):
        pass

    assert seen == [7]
    assert issubclass(Child, Base)


def test_entries_that_a_shell_would_misread_are_left_out(caplog):
    with caplog.at_level(logging.WARNING, logger="accel_state.environment"):
        lines = convert_dict_to_env_variables(
            {"ACCELERATE_DEBUG_MODE": "1", "BAD_ENV_NAME": "<mything", "OTHER_ENV": "2", "EMPTY": ""}
        )
    assert lines == ["ACCELERATE_DEBUG_MODE=1\n", "OTHER_ENV=2\n"]
    assert [record.args[0] for record in caplog.records] == ["BAD_ENV_NAME", "EMPTY"]


def test_imported_libraries_are_known():
    assert are_libraries_initialized("os", "no_such_library") == ["os"]


def test_place_among_cpu_processes():
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation()
        os.environ.update(PMI_RANK="1", PMI_SIZE="4", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="4")
        assert get_cpu_distributed_information() == CPUInformation(1, 4, 1, 4)


def test_the_device_type_falls_back_to_cuda():
    type_, family = get_current_device_type()
    assert (type_, family) == ("cuda", "MULTI_GPU") or family.startswith("MULTI_")


def test_usable_cpus_are_those_of_the_affinity_and_all_where_there_is_none(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2}, raising=False)
    assert usable_cpus() == [2, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cpus() == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/pod/container\n", {"pod/cpu.max": "400000 100000\n", "pod/container/cpu.max": "max 100000\n"}, 4),
        ("3:cpuset:/\n2:cpu,cpuacct:/docker/1\n", {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n"}, 2),
        ("2:cpu:/docker/1\n", {"cpu/docker/1/cpu.cfs_quota_us": "-1\n"}, 8),
        ("3:cpuset:/\n", {"cpu.max": "100000 100000\n"}, 8),
        ("", {}, 8),
    ],
    ids=["v2", "half", "no limit", "outer group", "v1", "v1 without limit", "other controller", "no groups"],
)
def test_cpus_are_limited_by_the_quotas_of_control_groups(tmp_path, monkeypatch, groups, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        if "quota" in name:
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus(tmp_path) == expected


def test_without_control_groups_cpus_are_those_of_the_affinity(tmp_path):
    assert available_cpus(tmp_path) == len(usable_cpus())
