import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from accel_ckpt import open_checkpoint
from accel_ckpt.format import blocks
from accel_ckpt.io.thread_pool import default_threads
from accel_ckpt.tools.rank_states import save_for_ranks


def test_a_thread_compares_all_files_of_a_checkpoint_in_one_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept a block for each file: 8 GiB for those of a thousand ranks."""
    save_for_ranks(tmp_path / "a", {"step": 1}, [{"w": torch.full((9,), rank)} for rank in range(20)])
    made: list[int] = []

    class Counted(mmap.mmap):
        def __new__(cls, file: int, size: int) -> "Counted":
            made.append(size)
            return super().__new__(cls, file, size)

    monkeypatch.setattr(blocks.mmap, "mmap", Counted)
    with open_checkpoint(tmp_path / "a") as saved:
        assert [int(saved.read_local("w", rank)[0]) for rank in range(20)] == list(range(20))
    assert len(made) <= 3 * default_threads()


def test_a_checkpoint_may_have_more_files_than_the_limit_on_open_ones(tmp_path: Path) -> None:
    save_for_ranks(tmp_path / "a", {"step": 1}, [{"w": torch.ones(3)} for _ in range(40)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with open_checkpoint(tmp_path / "a") as saved:
            assert len(saved.manifest.files) == 81
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
