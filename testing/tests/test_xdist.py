"""Workers of pytest-xdist have a pool each, side by side."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

TESTS = """
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(6))
def test_sum(rank, number, tmp_path):
    import torch, torch.distributed as dist

    total = torch.tensor([float(number + rank)])
    dist.all_reduce(total)
    assert total.item() == 2 * number + 1

@pytest.mark.ranks(2)
def test_fails(rank):
    print("said by", rank)
    assert rank == 0, "only the first"
"""


@pytest.mark.slow
def test_workers_run_ranks_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    command += ["--basetemp", "base"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 failed, 6 passed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError: only the first (rank 1)" in done.stdout
    assert "said by 0" in done.stdout
