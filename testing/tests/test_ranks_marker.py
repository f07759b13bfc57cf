"""Tests marked ``ranks`` run in their ranks, with their arguments."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.ranks(2)
def test_ranks_share_a_group(rank: int, world_size: int) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3


@pytest.mark.ranks(4)
def test_pool_grows(rank: int, world_size: int) -> None:
    ranks = [None] * world_size
    dist.all_gather_object(ranks, rank)
    assert ranks == [0, 1, 2, 3]


@pytest.mark.ranks(2, group=False)
def test_without_group_there_are_only_variables(rank: int) -> None:
    assert not dist.is_initialized()
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == "2"
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(1,), (2, 3)], ids=str)
def test_parameters_and_tmp_path_arrive(rank: int, shape: tuple[int, ...], tmp_path) -> None:
    (tmp_path / str(rank)).write_text(str(shape))
    dist.barrier()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [str(shape)] * 2


class TestInClass:
    factor = 3

    def setup_method(self) -> None:
        self.made = 7

    @pytest.mark.ranks(2)
    def test_methods_have_their_class(self, rank: int) -> None:
        assert self.factor == 3
        assert self.made == 7


@pytest.mark.ranks(2)
def test_monkeypatch_is_made_in_each_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", str(rank))
    assert os.environ["OF_THIS_TEST"] == str(rank)


def test_one_process_is_rank_zero_of_one(rank: int, world_size: int) -> None:
    assert (rank, world_size) == (0, 1)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_BY_FIXTURE", "yes")
    monkeypatch.delenv("PATH")


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("elsewhere")
def test_what_fixtures_set_holds_in_ranks(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert os.environ["SET_BY_FIXTURE"] == "yes"
    assert "PATH" not in os.environ


@pytest.mark.ranks(2)
def test_and_only_for_their_test() -> None:
    assert "SET_BY_FIXTURE" not in os.environ
    assert "PATH" in os.environ


@pytest.mark.ranks(2, env={"OWN": "variable"})
def test_variables_of_the_marker() -> None:
    assert os.environ["OWN"] == "variable"


@pytest.mark.ranks(2)
@settings(derandomize=True, database=None, deadline=None, max_examples=5)
@given(value=st.integers(0, 100))
def test_properties_hold_on_ranks(value: int) -> None:
    total = torch.tensor([value])
    dist.all_reduce(total)
    assert total.item() == 2 * value
