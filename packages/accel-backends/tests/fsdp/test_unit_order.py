"""Units come in one order in every process, whatever its hash seed."""

import json
import os
import subprocess
import sys

from accel_backends.fsdp.wrap_units import Units
from accel_backends.ops.fqn import natural

PLANS = """
import json
import torch
from torch import nn
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.wrap_units import find_units, parameters_of_units
from accel_testing.equivalence.models import TinyTransformer, TinyBlock

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(4000, 8) for name in "qwertyuiop"})
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(12))
        self.blocks = nn.ModuleList(TinyBlock(8, 2) for _ in range(12))

shared = TinyTransformer(layers=12)
shared.blocks[7] = shared.blocks[3]
shared.blocks[5].up.weight = shared.blocks[6].up.weight
plans = []
for model in (TinyTransformer(layers=12), shared, Wide()):
    units = find_units(model, FSDPConfig(ignored_modules=r"blocks\\.(2|4)"), halves=True)
    plans.append([list(parameters_of_units(model, units).items()), units.inside_out])
print(json.dumps(plans))
"""


def test_two_hash_seeds_plan_the_same_units() -> None:
    plans = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PLANS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    assert plans[0] == plans[1]
    assert [len(inside_out) for *_, inside_out in plans[0]] == [10, 7, 32]


def test_units_come_inside_out_and_by_number() -> None:
    units = Units(blocks=("layers.10", "layers.9", "layers.1"), extra=("table",), wide=("layers.9.norm",))
    assert units.inside_out == ["layers.9.norm", "layers.1", "layers.9", "layers.10", "table"]


def test_numbers_in_names_count() -> None:
    assert sorted(["a.10.b", "a.9.b", "a.b", "a"], key=natural) == ["a", "a.9.b", "a.10.b", "a.b"]
