"""Sizes of a model are those of its weights, each once, or an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_planner.profile.model_sizes import sizes_of
from accel_state.errors import ConfigError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def in_shards(folder: Path) -> None:
    save_file({"a": torch.ones(4)}, folder / SHARDS[0])
    save_file({"b": torch.ones(2, dtype=torch.int8)}, folder / SHARDS[1])
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_index_says_which_files_are_the_weights(tmp_path: Path) -> None:
    in_shards(tmp_path)
    save_file({"layers.a": torch.ones(4), "layers.b": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert sizes_of(str(tmp_path), None, False)[1] == {"a": (4, True), "b": (2, False)}


def test_one_file_of_all_weights_is_preferred_to_others(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    save_file({"x": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    assert sizes_of(str(tmp_path), None, False)[1] == {"a": (4, True)}


def test_a_model_that_is_not_all_there_is_refused(tmp_path: Path) -> None:
    in_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of the 2 files of its index: {SHARDS[1]}"):
        sizes_of(str(tmp_path), None, False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as an index"):
        sizes_of(str(tmp_path), None, False)


def test_a_checkpoint_of_a_run_is_no_model(tmp_path: Path) -> None:
    for name in ("manifest.json", "tree.json"):
        (tmp_path / name).write_text("{}")
    save_file({"exp_avg": torch.ones(4)}, tmp_path / "tensors-00000.safetensors")
    with pytest.raises(ConfigError, match=r"is the checkpoint of a run.*merge-weights"):
        sizes_of(str(tmp_path), None, False)
