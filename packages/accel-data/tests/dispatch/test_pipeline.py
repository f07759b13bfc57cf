"""Threads of a dispatched pass end before the interpreter does."""

import subprocess
import sys

import pytest

ENDS_INSIDE = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from accel_data import LoaderOptions, prepare_loader
from accel_state.parallelism.config import DataShard

class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((20000,), float(index))

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
loader = prepare_loader(DataLoader(Rows(), 2), DataShard(rank, 2), options=LoaderOptions(dispatch_batches=True))
begun = iter(loader)
for _ in range(3):
    next(begun)
"""


@pytest.mark.slow
@pytest.mark.fault
def test_a_program_that_ends_inside_a_dispatched_pass_ends_well(tmp_path):
    for number in range(2):  # it aborted in two runs of three
        store = str(tmp_path / str(number))
        ranks = [
            subprocess.Popen([sys.executable, "-c", ENDS_INSIDE, str(rank), store], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=60)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)] == [(0, "")] * 2
