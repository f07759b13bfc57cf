"""Offload folders: files, index, and what a full disk leaves."""

import json
import os
import subprocess
import sys

import pytest
import torch

from accel_inference.prefetch.weights_map import OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict
from accel_inference.weights import offload_folder
from accel_inference.weights.offload_folder import (
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_weight_comes_back_as_it_was(dtype, tmp_path):
    weight = torch.randn(2, 3).to(dtype)
    index = offload_weight(weight, "weight", tmp_path, {})
    assert index == {"weight": {"shape": [2, 3], "dtype": str(dtype).removeprefix("torch.")}}
    found = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize("weight", [torch.tensor(3.0), torch.zeros(0, 4), torch.arange(12.0).reshape(3, 4).t()])
def test_scalars_empty_and_transposed_weights_come_back(weight, tmp_path):
    index = offload_weight(weight, "weight", tmp_path)
    assert torch.equal(load_offloaded_weight(tmp_path / "weight.dat", index["weight"]), weight)


def test_views_of_one_memory_that_differ_are_written_apart(tmp_path):
    square = torch.arange(4.0).view(2, 2)
    index = offload_state_dict(tmp_path, {"a": square, "same": square, "turned": square.t()})
    found = {name: load_offloaded_weight(tmp_path / f"{name}.dat", entry) for name, entry in index.items()}
    assert torch.equal(found["a"], square)
    assert torch.equal(found["same"], square)
    assert torch.equal(found["turned"], square.t())


def test_an_index_keeps_what_it_had(tmp_path):
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [2]}}, tmp_path)
    save_offload_index({}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_names_of_one_tensor_share_a_file(tmp_path):
    weight = torch.ones(4)
    offload_state_dict(tmp_path, {"a": weight, "b": weight, "c": weight.clone()})
    assert os.path.samefile(tmp_path / "a.dat", tmp_path / "b.dat")
    assert not os.path.samefile(tmp_path / "a.dat", tmp_path / "c.dat")
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert weights.source("a").key == weights.source("b").key


def test_a_folder_that_cannot_be_written_is_named_and_keeps_no_part(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot offload weight \(16 bytes\) to .*missing"):
        offload_weight(torch.ones(4), "weight", tmp_path / "missing")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_leaves_no_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_folder.secrets, "token_hex", lambda count: "0")
    (tmp_path / "weight.dat.0.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        offload_weight(torch.ones(10_000), "weight", tmp_path)
    assert not list(tmp_path.glob("weight*"))


def test_a_cut_file_is_refused(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(4)})
    os.truncate(tmp_path / "weight.dat", 8)
    with pytest.raises(CheckpointCorruptError, match="8 bytes, and weight has 16"):
        OffloadedWeightsLoader(save_folder=tmp_path)["weight"]
    (tmp_path / "weight.dat").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        OffloadedWeightsLoader(save_folder=tmp_path)["weight"]


def test_a_mapping_has_host_and_file_weights(tmp_path):
    offload_state_dict(tmp_path, {"a.weight": torch.ones(2)})
    weights = OffloadedWeightsLoader({"a.bias": torch.zeros(2)}, tmp_path)
    assert list(weights) == ["a.bias", "a.weight"]
    assert len(weights) == 2
    part = PrefixedDataset(PrefixedDataset(weights, "a."), "wei")
    assert part["ght"].tolist() == [1, 1]
    assert (list(PrefixedDataset(weights, "a.")), "ght" in part) == (["bias", "weight"], True)
    assert part.origin() == (weights, "a.wei")
    with pytest.raises(ValueError, match="state_dict"):
        OffloadedWeightsLoader()


def test_a_tied_name_without_file_is_served(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    weights.tie([["a", "b"]])
    assert weights["b"].tolist() == [1, 1]


def test_submodules_with_a_common_beginning_are_told_apart():
    state = {"a.1": 0, "a.10": 1, "a.2": 2, "a.1.b": 3}
    assert extract_submodules_state_dict(state, ["a.1"]) == {"a.1": 0, "a.1.b": 3}
    assert read_offload_index("/nowhere") == {}


def test_processes_that_write_the_same_weights_at_once_leave_full_files(tmp_path):
    program = (
        "import sys, torch\n"
        "from accel_inference import offload_state_dict\n"
        "for _ in range(50): offload_state_dict(sys.argv[1], {'weight': torch.ones(50_000)})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["weight"], torch.ones(50_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "weight.dat"]


def test_a_folder_keeps_its_weights_and_refuses_others(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(4)})
    before = (tmp_path / "weight.dat").stat()
    offload_state_dict(tmp_path, {"weight": torch.ones(4)})
    for other in (torch.zeros(4), torch.ones(5), torch.ones(0)):
        with pytest.raises(CheckpointMismatchError, match=r"weight\.dat has other bytes .* folder of its own"):
            offload_weight(other, "weight", tmp_path)
    after = (tmp_path / "weight.dat").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # reading changes st_atime
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "weight.dat"]


def test_names_that_share_a_tensor_now_do_not_replace_another_file(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(4), "b": torch.zeros(4)})
    shared = torch.ones(4)
    with pytest.raises(CheckpointMismatchError, match=r"b\.dat has other bytes"):
        offload_state_dict(tmp_path, {"a": shared, "b": shared})
    assert load_offloaded_weight(tmp_path / "b.dat", {"dtype": "float32", "shape": [4]}).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no object of objects"),
        ('{"weight": 3}', "no object of objects"),
        ('{"weight": {"shape": [4]}}', "entry of weight that cannot be read"),
        ('{"weight": {"dtype": "float33", "shape": [4]}}', "entry of weight that cannot be read"),
        ('{"weight": {"dtype": "float32", "shape": "four"}}', "entry of weight that cannot be read"),
    ],
)
def test_an_index_that_cannot_be_read_is_named(content, said, tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(4)})
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointCorruptError, match=said):
        OffloadedWeightsLoader(save_folder=tmp_path)["weight"]
