"""A checkpoint whose writer had no record of a kind of part leaves the run's own parts as they are."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_ckpt import open_checkpoint
from accel_ckpt.tools.rank_states import save_for_ranks
from accel_state.errors import CheckpointMismatchError


def without(checkpoint: Path, name: str, target: Path, unknown: list[str]) -> None:
    with open_checkpoint(checkpoint) as saved:
        state = {one: saved.read(one) for one in saved.names if one != name}
        local = [{"rng": saved.read_local("rng", 0)}]
        save_for_ranks(target, state, local, metadata={**saved.metadata, "unknown": unknown}).close()


@pytest.mark.parametrize("unknown", [["loader"], []])
def test_loaders_that_a_checkpoint_says_nothing_of_keep_their_position(tmp_path: Path, unknown: list[str]) -> None:
    accelerator = Accelerator(cpu=True)
    model, loader, _ = accelerator.prepare(
        torch.nn.Linear(2, 1), *(DataLoader(torch.arange(8.0), batch_size=2) for _ in range(2))
    )
    accelerator.save_state(tmp_path / "saved")
    without(tmp_path / "saved", "loader", tmp_path / "made", unknown)
    weight = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    next(iter(loader))
    before = loader.state_dict()
    if not unknown:
        with pytest.raises(CheckpointMismatchError, match="it holds no loader"):
            accelerator.load_state(tmp_path / "made")
        accelerator.end_training()
        return
    accelerator.load_state(tmp_path / "made")
    assert torch.equal(model.weight, weight)
    assert loader.state_dict() == before
    assert accelerator.last_load is not None
    assert accelerator.last_load.kept == ("loader",)
    assert "loader_1" in accelerator.last_load.parts
    accelerator.end_training()
