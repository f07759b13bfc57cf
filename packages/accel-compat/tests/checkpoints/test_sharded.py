"""Shards of torch's distributed checkpoints, merged into one file."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from accel_compat.checkpoints.pickles import load
from accel_compat.checkpoints.sharded import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.options.fsdp import CompatFSDPPlugin
from accel_compat.state.accelerator_state import SharedAcceleratorState
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
    with pytest.raises(expected, match=r"the shards of .* cannot be read: .*No such file") as caught:
        merge_fsdp_weights(folder, tmp_path / "merged", remove_checkpoint_dir=True)
    assert rank or isinstance(caught.value.__cause__, CheckpointException)
    assert rank or folder.is_dir()
    SharedAcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.ranks(2)
def test_models_and_optimizers_with_a_damaged_shard_are_errors_on_every_rank(rank, tmp_path):
    run, model = tmp_path / "run", nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    accelerator = CompatAccelerator(cpu=True)
    plugin = CompatFSDPPlugin(state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, run)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, run)
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    load_fsdp_model(plugin, accelerator, model, run)
    assert torch.equal(model.weight, weight)
    if rank == 0:
        for shard in run.glob("*_0/*.distcp"):
            shard.unlink()
    said = r"the shards of .*{} cannot be read: .*No such file"
    with pytest.raises(CheckpointError, match=said.format("pytorch_model_fsdp_0")) as caught:
        load_fsdp_model(plugin, accelerator, model, run)
    assert isinstance(caught.value.__cause__, CheckpointException)
    with pytest.raises(CheckpointError, match=said.format("optimizer_0")):
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, run)
    SharedAcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.ranks(2)
def test_a_folder_whose_name_resembles_that_of_shards_keeps_two_models_apart(rank, tmp_path):
    run, plugin = tmp_path / "my_pytorch_model_fsdp_old", CompatFSDPPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = CompatAccelerator(cpu=True)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    saved = [model.weight.detach().clone() for model in models]
    for index, model in enumerate(models):
        save_fsdp_model(plugin, accelerator, model, run, index)
        nn.init.zeros_(model.weight)
    if rank == 0:
        (run / "pytorch_model_fsdp_1").rename(tmp_path / "renamed")
    accelerator.wait_for_everyone()
    for index, folder in enumerate((run, tmp_path / "renamed")):  # a folder of shards may be named itself
        load_fsdp_model(plugin, accelerator, models[index], folder, index)
        assert torch.equal(models[index].weight, saved[index])
    SharedAcceleratorState._reset_state(reset_partial_state=True)


def test_files_of_single_ranks_are_refused(tmp_path):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_model, save_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    for function in (save_fsdp_model, load_fsdp_model):
        with pytest.raises(ValueError, match=r"use_dcp=False with shards.*nearest: use_dcp=True"):
            function(plugin, accelerator, model, tmp_path, use_dcp=False)
    assert list(tmp_path.iterdir()) == []
