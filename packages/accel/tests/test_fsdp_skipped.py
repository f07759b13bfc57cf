"""Ranks that take different blocks of a sharded model get an error: no hang, and no other weights."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, ParallelismConfig
from accel_state.errors import CollectiveMismatchError
from accel_testing import RankPool
from accel_testing.programs.runs import run_script


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        x = self.first(x)
        for block in blocks:
            x = self.blocks[block](x)
        return x


def train(version: int, taken: tuple[list[int], list[int]], *, apart: bool = False, unused: bool = False) -> None:
    """Two steps with all blocks, and two in which each rank takes its own of ``taken``.

    Ranks that are ``apart`` take each other for another machine's, by name, so they share no memory in which they are
    compared.
    """
    rank = int(os.environ["RANK"])
    host, plugin = socket.gethostname, {"fsdp_version": version, "transformer_cls_names_to_wrap": ["Sequential"]}
    if apart:
        socket.gethostname = lambda: f"machine{rank}"
    try:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin | ({"find_unused_parameters": True} if unused else {}))
    finally:
        socket.gethostname = host
    model = Choosing()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        blocks = [0, 1, 2, 3] if step < 2 else taken[rank]
        accelerator.backward(model(torch.ones(2, 4), blocks).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def want_state(version: int) -> None:
    """Rank 0 alone asks for the full state."""
    accelerator = Accelerator(cpu=True, fsdp_plugin={"fsdp_version": version})
    model = accelerator.prepare(nn.Linear(4, 4))
    if accelerator.is_main_process:
        accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()


def evaluate(version: int) -> None:
    """Each of two replicas, of two ranks, evaluates its own number of batches after a step."""
    degrees = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin={"fsdp_version": version}, parallelism_config=degrees)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    model.eval()
    with torch.no_grad():
        for _ in range(2 + accelerator.process_index // 2):
            assert model(torch.ones(2, 4)).isfinite().all()
    assert accelerator.reduce(torch.ones(1)).item() == 4
    accelerator.end_training()


# What each of two ranks takes.
CASES = {
    "one more": ([0, 1, 2], [0, 1]),
    "others": ([0, 1], [0, 2]),
    "other order": ([0, 1, 2], [0, 2, 1]),
    "others, as many later": ([0, 3], [2, 3]),
}


DIFFERENT = r"the ranks entered different operations.*:\n  rank 0: {}.*\n.*  rank 1: {}"


# The other pairs wait as long for the same end.
QUICK = {("others, as many later", 2), ("one more", 1)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "version"),
    [
        pytest.param(case, version, marks=() if (case, version) in QUICK else pytest.mark.slow)
        for case in CASES
        for version in (2, 1)
    ],
)
def test_ranks_that_take_different_blocks_are_named(version: int, case: str, rank_pool: RankPool) -> None:
    words = DIFFERENT.format(r"forward\(Choosing.blocks.", r"forward\((Choosing.blocks.|end of Choosing)")
    with pytest.raises(CollectiveMismatchError, match=words):
        rank_pool.run(train, version, CASES[case])


BETWEEN = r"rank 0: forward\(Choosing.blocks.* #(\d+).*\n.*rank 1: forward\(.* #\1 "


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("case", [case for case in CASES if case != "one more"])
@pytest.mark.sampled(2)
def test_ranks_of_several_machines_that_take_different_blocks_are_named(
    version: int, case: str, rank_pool: RankPool
) -> None:
    with pytest.raises(CollectiveMismatchError, match=BETWEEN):
        rank_pool.run(train, version, CASES[case], apart=True, group=None)


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 1])
def test_ranks_of_several_machines_of_which_one_takes_a_block_more_are_named(tmp_path: Path, version: int) -> None:
    """They wait in different operations, which ends the processes of those that cannot be freed."""
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_fsdp_skipped import CASES, train"
    (tmp_path / "train.py").write_text(f"{here}\ntrain({version}, CASES['one more'], apart=True)\n")
    done = run_script(tmp_path / "train.py", ranks=2, timeout=100).check_failed()
    assert re.search(BETWEEN, done.output)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.sampled(1)
def test_ranks_that_skip_the_same_blocks_train(version: int, apart: bool, rank_pool: RankPool) -> None:
    rank_pool.run(train, version, ([0, 2], [0, 2]), apart=apart, group=None)


def test_unused_parameters_do_not_make_different_blocks_one(rank_pool: RankPool) -> None:
    with pytest.raises(CollectiveMismatchError, match="the ranks entered different operations"):
        rank_pool.run(train, 2, CASES["others"], unused=True)


@pytest.mark.parametrize("version", [2, 1])
def test_a_state_that_one_rank_alone_wants_is_named(version: int, rank_pool: RankPool) -> None:
    words = DIFFERENT.format(r"get_state_dict\(", r"(wait_for_everyone|get_state_dict)\(")
    with pytest.raises(CollectiveMismatchError, match=words):
        rank_pool.run(want_state, version)


@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_replicas_may_evaluate_different_numbers_of_batches(version: int, rank_pool: RankPool) -> None:
    rank_pool.run(evaluate, version, ranks=4)
