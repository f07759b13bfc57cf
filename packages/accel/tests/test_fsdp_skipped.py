"""Ranks that take different blocks of a sharded model get an error: no hang, and no other weights."""

import re
from pathlib import Path

import pytest

from accel_testing.launching import run_script

TRAIN = """
import sys
import torch
from torch import nn
from accel import Accelerator

plugin, taken = {"fsdp_version": int(sys.argv[1]), "find_unused_parameters": sys.argv[2] == "unused"}, sys.argv[3:]
if not plugin["find_unused_parameters"]:
    del plugin["find_unused_parameters"]

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x, blocks):
        x = self.first(x)
        for block in blocks:
            x = self.blocks[block](x)
        return x

plugin["transformer_cls_names_to_wrap"] = ["Sequential"]
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = Choosing()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    blocks = [0, 1, 2, 3] if step < 2 else [int(one) for one in taken[accelerator.process_index].split(",")]
    accelerator.backward(model(torch.ones(2, 4), blocks).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
accelerator.end_training()
"""
CASES = {
    "one more": ("0,1,2", "0,1"),
    "others": ("0,1", "0,2"),
    "other order": ("0,1,2", "0,2,1"),
    "others, as many later": ("0,3", "2,3"),
}


# The other pairs wait as long for the same end.
QUICK = {("others", 2), ("others, as many later", 2), ("one more", 1)}


@pytest.mark.parametrize(
    ("case", "version"),
    [
        pytest.param(case, version, marks=() if (case, version) in QUICK else pytest.mark.slow)
        for case in CASES
        for version in (2, 1)
    ],
)
def test_ranks_that_take_different_blocks_are_named(tmp_path: Path, version: int, case: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_script(script, str(version), "used", *CASES[case], ranks=2, timeout=60).check_failed()
    assert "CollectiveMismatchError: the ranks entered different operations" in done.output
    assert "rank 0: forward(Choosing.blocks." in done.output
    assert re.search(r"rank 1: forward\((Choosing.blocks.|end of Choosing)", done.output)
    assert "trained" not in done.output


# Ranks that take each other for another machine's: they share no memory in which they could be compared.
APART = "import socket, os; socket.gethostname = lambda: 'machine' + os.environ['RANK']\n"


@pytest.mark.parametrize(
    ("case", "version"),
    [
        pytest.param(case, version, marks=() if (case, version) == ("others", 2) else pytest.mark.slow)
        for case in CASES
        for version in (2, 1)
    ],
)
def test_ranks_of_several_machines_that_take_different_blocks_are_named(
    tmp_path: Path, version: int, case: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(APART + TRAIN)
    done = run_script(script, str(version), "used", *CASES[case], ranks=2, timeout=100).check_failed()
    assert "trained" not in done.output
    assert re.search(r"rank 0: forward\(Choosing.blocks.* #(\d+).*\n.*rank 1: forward\(.* #\1 ", done.output)


@pytest.mark.parametrize(
    ("version", "machines"),
    [(2, "apart"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(1, "apart"), (2, "one"), (1, "one")])],
)
def test_ranks_that_skip_the_same_blocks_train(tmp_path: Path, version: int, machines: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(APART + TRAIN if machines == "apart" else TRAIN)
    done = run_script(script, str(version), "used", "0,2", "0,2", ranks=2, timeout=60).check()
    assert done.output.count("trained") == 2


def test_unused_parameters_do_not_make_different_blocks_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_script(script, "2", "unused", *CASES["others"], ranks=2, timeout=60).check_failed()
    assert "CollectiveMismatchError: the ranks entered different operations" in done.output


STATE = """
import sys
import torch
from torch import nn
from accel import Accelerator

accelerator = Accelerator(cpu=True, fsdp_plugin={"fsdp_version": int(sys.argv[1])})
model = accelerator.prepare(nn.Linear(4, 4))
if accelerator.is_main_process:
    accelerator.get_state_dict(model)
    print("saved", flush=True)
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_state_that_one_rank_alone_wants_is_named(tmp_path: Path, version: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(STATE)
    done = run_script(script, str(version), ranks=2, timeout=60).check_failed()
    assert "CollectiveMismatchError: the ranks entered different operations" in done.output
    assert re.search(r"rank 0: get_state_dict\(.*\n.*rank 1: (wait_for_everyone|get_state_dict)\(", done.output)
    assert "saved" not in done.output
