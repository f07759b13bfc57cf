"""A call under ``PrepareForLaunch`` finds the variables and the group of its rank."""

import os

import pytest
import torch.distributed as dist


@pytest.mark.parametrize(
    ("kind", "variables", "expected"),
    [
        ("MULTI_CPU", {"NPROC": "2", "NODE_RANK": "3"}, ("1", "7")),
        ("MULTI_GPU", {}, ("1", "1")),
        ("NO", {}, (None, None)),
    ],
)
def test_the_rank_is_that_of_the_process_on_its_node(monkeypatch, kind, variables, expected):
    from accelerate.utils import PrepareForLaunch

    for name in ("LOCAL_RANK", "RANK", "NPROC", "NODE_RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    PrepareForLaunch(lambda *args: seen.append((args, *map(os.environ.get, ("LOCAL_RANK", "RANK")))), kind)(1, "a", 2)
    assert seen == [(("a", 2), *expected)]
    assert os.environ["FORK_LAUNCHED"] == "1"


def test_debug_opens_a_group_over_a_file(monkeypatch, tmp_path):
    from accelerate.utils.launch import PrepareForLaunch

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("FORK_LAUNCHED", "0")
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "store"))
    seen = []
    try:
        PrepareForLaunch(lambda: seen.append((dist.get_backend(), dist.get_world_size())), debug=True)(0)
    finally:
        dist.destroy_process_group()
    assert seen == [("gloo", 1)]
