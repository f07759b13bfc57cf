"""Collectives in which the ranks differ are named by default, the first of a run as well."""

from pathlib import Path

import pytest

from accel_testing.programs.runs import run_script

DIVERGENT = """
import sys
from collections import OrderedDict
from dataclasses import dataclass
import torch
from accel import Accelerator
from accel_state.collectives import tensors as collectives

@dataclass
class Pair:
    first: torch.Tensor

kind = sys.argv[1]
accelerator = Accelerator(cpu=True)
odd = accelerator.process_index == 1
ones = torch.ones
calls = {
    "dimensions": lambda: accelerator.gather(ones(6) if odd else ones(2, 3)),
    "shape": lambda: accelerator.gather(ones(3) if odd else ones(2)),
    "dtype": lambda: accelerator.gather(ones(2).double() if odd else ones(2)),
    "keys": lambda: accelerator.gather({"b": ones(2)} if odd else {"a": ones(2)}),
    "length": lambda: accelerator.gather([ones(2)] * (2 if odd else 1)),
    "dataclass": lambda: accelerator.gather(Pair(ones(6) if odd else ones(2, 3))),
    "reduction": lambda: accelerator.reduce(ones(2), "max" if odd else "sum"),
    "source": lambda: collectives.broadcast(ones(2), 1 if odd else 0),
    "objects": lambda: collectives.broadcast_object_list([0] * (3 if odd else 2)),
    "names": lambda: accelerator.log({"b" if odd else "a": 1.0, "same": 2.0}, reduce="mean"),
    "operation": lambda: accelerator.wait_for_everyone() if odd else accelerator.gather(ones(2)),
}
try:
    calls[kind]()
except Exception as error:
    print("RAISED", type(error).__name__, error, flush=True)
"""
DESCRIBED = {
    "dimensions": ("gather(float32[2, 3])", "gather(float32[6])"),
    "shape": ("gather(float32[2])", "gather(float32[3])"),
    "dtype": ("gather(float32[2])", "gather(float64[2])"),
    "keys": ("gather({a: float32[2]})", "gather({b: float32[2]})"),
    "length": ("gather([float32[2]])", "gather([float32[2], float32[2]])"),
    "dataclass": ("gather({first: float32[2, 3]})", "gather({first: float32[6]})"),
    "reduction": ("reduce(float32[2], sum)", "reduce(float32[2], max)"),
    "source": ("broadcast(float32[2], 0)", "broadcast(float32[2], 1)"),
    "objects": ("broadcast_object_list(2 objects, 0)", "broadcast_object_list(3 objects, 0)"),
    "names": ("log(a, same)", "log(b, same)"),
    "operation": ("gather(float32[2])", "wait_for_everyone()"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", DESCRIBED)
def test_the_ranks_and_both_descriptions_are_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(DIVERGENT)
    finished = run_script(tmp_path / "train.py", kind, ranks=2, cwd=tmp_path, timeout=60)
    assert "RAISED CollectiveMismatchError" in finished.output, finished.output
    for rank, said in enumerate(finished.outputs):
        assert "RAISED Collective" in said, (rank, finished.output)
        for number, description in enumerate(DESCRIBED[kind]):
            assert f"rank {number}: {description}" in said or description in said, (rank, said)
