"""``save_model`` and ``save`` write what other tools read: plain safetensors, and never a pickle."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    cpu_offload,
    disk_offload,
    dispatch_model,
)
from accel_ckpt import load_model_files
from accel_state.errors import CheckpointError, ConfigError, PrepareError


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.embedding(tokens))))


def assert_loads(folder: Path) -> None:
    """The files hold the model's own names and values, tied ones included."""
    fresh = Tied()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(load_model_files(folder))
    expected = Tied().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in fresh.state_dict().items())


def test_a_prepared_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    files = accelerator.save_model(model, tmp_path / "out")
    assert files == [tmp_path / "out" / "model.safetensors"]
    assert_loads(tmp_path / "out")
    assert "head.weight" not in load_file(files[0]), "tied parameters are written once"


def test_large_models_become_shards_and_a_smaller_save_removes_them(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    files = accelerator.save_model(model, tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert_loads(tmp_path)
    accelerator.save_model(model, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_ranks_save_one_model_together(tmp_path: Path, sharded: bool) -> None:
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path, max_shard_size="2KB")
    accelerator.wait_for_everyone()
    assert_loads(tmp_path)


@pytest.mark.ranks(2)
def test_only_the_main_process_saves_tensors(tmp_path: Path, rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save({"rank": torch.tensor(rank)}, tmp_path / "a.safetensors")
    if rank == 0:
        accelerator.save({"alone": torch.ones(2)}, tmp_path / "b.safetensors")
    accelerator.wait_for_everyone()
    assert load_model_files(tmp_path / "a.safetensors")["rank"].item() == 0
    assert (tmp_path / "b.safetensors").exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("each", [False, True])
def test_each_node_saves_tensors_where_that_is_asked_for(
    tmp_path: Path, rank: int, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=each))
    accelerator.save({"a": torch.ones(2)}, tmp_path / f"node{rank}.safetensors")
    accelerator.wait_for_everyone()
    assert sorted(os.listdir(tmp_path)) == [f"node{node}.safetensors" for node in range(1 + each)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, m, p: a.save_model(m, p, safe_serialization=False), ConfigError, "would write a pickle"),
        (lambda a, m, p: a.save({}, p / "x.safetensors", safe_serialization=False), ConfigError, "write the pickle"),
        (lambda a, m, p: a.save([1, 2], p / "x.safetensors"), ConfigError, "a mapping of names to tensors, not a list"),
        (lambda a, m, p: a.save({"n": 1}, p / "x.safetensors"), CheckpointError, "n is a int"),
        (lambda a, m, p: a.save(m.state_dict(), p / "x.bin"), CheckpointError, r"call it x\.safetensors"),
        (lambda a, m, p: a.save_model(m, p, max_shard_size="much"), CheckpointError, "'much' is no size"),
        (lambda a, m, p: a.save_model(nn.Linear(2, 2, device="meta"), p), CheckpointError, "meta device"),
    ],
)
def test_what_would_not_be_plain_safetensors_is_refused(
    tmp_path: Path, call: object, error: type[Exception], words: str
) -> None:
    assert callable(call)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(error, match=words):
        call(accelerator, accelerator.prepare(Tied()), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_a_model_with_offloaded_weights_is_exported_and_not_prepared(way: str, tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), Tied()
    if way == "map":
        places = {"embedding": "disk", "inner": "disk", "norm": "cpu", "head": "disk"}
        dispatch_model(model, places, offload_dir=tmp_path / "weights")
    else:
        cpu_offload(model) if way == "cpu" else disk_offload(model, tmp_path / "weights")
    state = accelerator.get_state_dict(model)
    expected = Tied().state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    accelerator.save_model(model, tmp_path / "export", max_shard_size="1KB")
    assert_loads(tmp_path / "export")
    with pytest.raises(PrepareError, match=r"weights of Tied are offloaded; .*remove_hook_from_submodules"):
        accelerator.prepare(model)
