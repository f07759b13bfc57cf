"""FSDP under real launchers: each rank a process of its own, with a hash seed of its own."""

from pathlib import Path

import pytest

from accel_testing.programs.runs import launch_by
from accel_testing.ranks.launchers import LAUNCHERS

TRAIN = """
import sys
import torch
from torch import nn
from accel import Accelerator
from accel_testing.equivalence.models import TinyTransformer

def batch(step):
    return torch.randint(0, 32, (4, 4), generator=torch.Generator().manual_seed(step))

def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

def made(layers):
    torch.manual_seed(layers)
    model = TinyTransformer(layers=layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

accelerator = Accelerator(cpu=True, strategy="fsdp")
assert accelerator.num_processes == 2
rank = accelerator.process_index
for layers in map(int, sys.argv[1:]):
    expected, stepping = made(layers)
    for step in range(2):
        loss_of(expected, batch(step)).backward()
        stepping.step()
        stepping.zero_grad()
    model, optimizer = accelerator.prepare(*made(layers))
    for step in range(2):
        accelerator.backward(loss_of(model, batch(step)[2 * rank : 2 * rank + 2]))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    for name, value in expected.named_parameters() if rank == 0 else ():
        distance = float((state[name] - value.detach()).abs().max())
        assert distance <= 1e-10 * float(value.abs().max()), f"{layers} blocks: {name} is {distance:.1e} away"
    accelerator.free_memory()
accelerator.end_training()
"""


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accel", marks=pytest.mark.slow)])
def test_any_number_of_blocks_trains_as_one_process(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    launch_by(launcher, script, "3", "12").check()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("attempt", range(10))
def test_any_number_of_blocks_trains_under_any_hash_seed(tmp_path: Path, launcher: str, attempt: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    launch_by(launcher, script, *map(str, range(1, 13)), timeout=280).check()
