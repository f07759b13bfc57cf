"""Shards of torch's distributed checkpoints, merged into one file."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from accel_compat.checkpoints.pickles import load
from accel_compat.checkpoints.sharded import merge_fsdp_weights
from accel_state.errors import CheckpointError, CollectiveError


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "run" / "pytorch_model_fsdp_0"
    dcp.save({"model": {"layer.weight": torch.arange(6.0).view(2, 3)}}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("safe", [True, False])
def test_the_file_has_the_full_tensors_and_the_shards_go_only_when_asked(shards, tmp_path, safe):
    merge_fsdp_weights(shards, tmp_path / "merged", safe_serialization=safe)
    (file,) = (tmp_path / "merged").iterdir()
    assert file.name == ("model.safetensors" if safe else "pytorch_model.bin")
    merged = load_file(file) if safe else load(file)
    assert list(merged) == ["layer.weight"]
    assert torch.equal(merged["layer.weight"], torch.arange(6.0).view(2, 3))
    assert shards.is_dir()
    merge_fsdp_weights(shards, tmp_path / "again", safe_serialization=safe, remove_checkpoint_dir=True)
    assert not shards.exists()
    assert [one.name for one in (tmp_path / "again").iterdir()] == [file.name]


def test_folders_that_cannot_be_merged_are_refused(shards, tmp_path):
    with pytest.raises(ValueError, match=r"no file \.metadata\); nearest: .*pytorch_model_fsdp_0"):
        merge_fsdp_weights(shards.parent, tmp_path / "merged")
    for output in (shards, shards / "merged"):
        with pytest.raises(ValueError, match="expected an output_path outside of it"):
            merge_fsdp_weights(shards, output, remove_checkpoint_dir=True)
    assert (shards / ".metadata").is_file()


@pytest.mark.ranks(2)
def test_a_damaged_shard_is_an_error_on_every_rank(rank, tmp_path):
    folder = tmp_path / "shards"
    if rank == 0:
        dcp.save({"model": {"weight": torch.ones(2, 3)}}, checkpoint_id=folder, no_dist=True)
        next(folder.glob("*.distcp")).unlink()
    expected = CheckpointError if rank == 0 else CollectiveError
    with pytest.raises(expected, match="cannot be read"):
        merge_fsdp_weights(folder, tmp_path / "merged", remove_checkpoint_dir=True)
    assert rank or folder.is_dir()
