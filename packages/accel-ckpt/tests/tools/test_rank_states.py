"""One process writes the checkpoint of several ranks."""

from pathlib import Path

import pytest
import torch

from accel_ckpt import open_checkpoint
from accel_ckpt.tools.rank_states import save_for_ranks
from accel_state.errors import CheckpointError


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_has_its_own_state_and_all_have_the_common_one(tmp_path: Path, ranks: int) -> None:
    weight = torch.randn(200, 100)
    own = [{"rng": {"words": torch.arange(rank, rank + 5), "rank": rank}} for rank in range(ranks)]
    save_for_ranks(tmp_path / "made", {"model": {"w": weight, "tied": weight}}, own, metadata={"seed": 3}).close()
    with open_checkpoint(tmp_path / "made") as saved:
        saved.verify()
        assert (saved.world_size, saved.metadata) == (ranks, {"seed": 3})
        assert torch.equal(saved.read("model")["w"], weight)
        for rank in range(ranks):
            found = saved.read_local("rng", rank)
            assert found["rank"] == rank
            assert torch.equal(found["words"], own[rank]["rng"]["words"])


def test_nothing_is_written_where_a_checkpoint_is_or_a_value_cannot_be_stored(tmp_path: Path) -> None:
    save_for_ranks(tmp_path / "made", {"n": 1}, [{}])
    with pytest.raises(CheckpointError, match="a checkpoint is there already"):
        save_for_ranks(tmp_path / "made", {"n": 2}, [{}])
    assert save_for_ranks(tmp_path / "made", {"n": 2}, [{}], overwrite=True).read("n") == 2
    with pytest.raises(CheckpointError, match="local is empty"):
        save_for_ranks(tmp_path / "other", {"n": 1}, [])
    with pytest.raises(CheckpointError, match="object"):
        save_for_ranks(tmp_path / "other", {"n": 1}, [{}, {"x": object()}])
    assert not (tmp_path / "other").exists()
