"""A rank that is alive and does not come in time is named where the others wait for it, DDP's own collectives too."""

import re
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_script

SLEEPS = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
from accel import Accelerator, InitProcessGroupKwargs

where, told = sys.argv[1], Path("told")
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
model, optimizer = accelerator.prepare(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    while not told.exists():
        time.sleep(0.05)  # sleeps
    sys.exit()
try:
    if where == "backward":
        accelerator.backward(model(torch.ones(2, 4)).sum())
    else:
        accelerator.gather(torch.ones(2))
except Exception as error:
    print("RAISED", type(error).__name__, error, flush=True)
finally:
    told.touch()
"""


@pytest.mark.parametrize("where", ["backward", pytest.param("gather", marks=pytest.mark.slow)])
def test_a_rank_that_sleeps_is_named_with_its_line(tmp_path: Path, where: str) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    finished = run_script(tmp_path / "train.py", where, ranks=2, cwd=tmp_path, timeout=60)
    line = next(number for number, text in enumerate(SLEEPS.splitlines(), 1) if text.endswith("# sleeps"))
    assert f"RAISED CollectiveError rank 1 has not come to {where}(" in finished.outputs[0], finished.output
    assert re.search(rf"rank 1 is at \S*train\.py:({line - 1}|{line})\b", finished.outputs[0]), finished.output
