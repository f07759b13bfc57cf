"""Checkpoints read into models, whatever their format, and refused whole when they do not fit."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.weights.checkpoint_files import load_state_dict
from accel_inference.weights.loading import load_checkpoint_in_model
from accel_inference.weights.offload_folder import read_offload_index
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


def sharded(state, folder, write, suffix):
    names = list(state)
    parts = {f"model-{index}{suffix}": names[index::2] for index in range(2)}
    for file, held in parts.items():
        write({name: state[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / f"model{suffix}.index.json").write_text(json.dumps(index))
    return folder


def one_safetensors(state, folder):
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def one_torch(state, folder):
    torch.save(state, folder / "any_name.bin")
    return folder / "any_name.bin"


def sharded_safetensors(state, folder):
    return sharded(state, folder, save_file, ".safetensors")


def sharded_torch(state, folder):
    return sharded(state, folder, torch.save, ".bin")


def the_index(state, folder):
    return sharded(state, folder, save_file, ".safetensors") / "model.safetensors.index.json"


def old_torch(state, folder):
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


WRITERS = [one_safetensors, one_torch, sharded_safetensors, sharded_torch, the_index, old_torch]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("empty", [False, True])
def test_every_format_gives_the_weights(three_layers, write, empty, tmp_path):
    expected = three_layers().state_dict()
    checkpoint = write(expected, tmp_path)
    with init_empty_weights(include_buffers=empty):
        model = three_layers()
    load_checkpoint_in_model(model, checkpoint, strict=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.linear1.weight.requires_grad


@pytest.mark.parametrize("write", [one_safetensors, one_torch])
def test_weights_on_disk_are_named_in_the_index_and_not_copied(three_layers, write, tmp_path):
    expected = three_layers().state_dict()
    checkpoint, folder = write(expected, tmp_path), tmp_path / "offload"
    with init_empty_weights():
        model = three_layers()
    device_map = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    load_checkpoint_in_model(model, checkpoint, device_map, offload_folder=folder)
    assert model.linear1.weight.is_meta
    assert torch.equal(model.batchnorm.weight, expected["batchnorm.weight"])
    assert set(read_offload_index(folder)) == {f"{a}.{b}" for a in ("linear1", "linear2") for b in ("weight", "bias")}
    copied = sorted(path.name for path in folder.glob("*.dat"))
    assert bool(copied) == (write is one_torch)


def test_dtypes_are_as_asked_and_integers_keep_theirs(three_layers, tmp_path):
    checkpoint = one_safetensors(three_layers().state_dict(), tmp_path)
    model = three_layers()
    load_checkpoint_in_model(model, checkpoint, dtype="bfloat16", keep_in_fp32_modules=["linear2"])
    assert {name: tensor.dtype for name, tensor in model.state_dict().items() if "bias" not in name} == {
        "linear1.weight": torch.bfloat16,
        "batchnorm.weight": torch.bfloat16,
        "batchnorm.running_mean": torch.bfloat16,
        "batchnorm.running_var": torch.bfloat16,
        "batchnorm.num_batches_tracked": torch.int64,
        "linear2.weight": torch.float32,
    }


def test_tied_weights_are_one_after_loading(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "1.weight"}
    checkpoint = one_safetensors(state, tmp_path)
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    empty[1].weight = empty[0].weight
    load_checkpoint_in_model(empty, checkpoint, strict=True)
    assert empty[1].weight is empty[0].weight
    assert torch.equal(empty[0].weight, state["0.weight"])


@pytest.mark.parametrize("places", [("cpu", "disk"), ("disk", "cpu"), ("disk", "disk")])
def test_a_tied_weight_is_loaded_for_each_of_its_places(places, tmp_path):
    save_file({"embed.weight": torch.arange(8.0).view(4, 2)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        model["head"].weight = model["embed"].weight
    device_map = dict(zip(("embed", "head"), places, strict=True))
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map, offload_folder=tmp_path / "offload")
    for _ in range(2):
        hidden = model["embed"](torch.tensor([3]))
        assert model["head"](hidden).tolist() == [[7, 33, 59, 85]]
    assert tuple("disk" if one.weight.is_meta else "cpu" for one in model.values()) == places


def test_a_module_that_two_others_share_is_loaded_where_the_map_has_it(tmp_path):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.append(model[0])
    torch.save(model.state_dict(), tmp_path / "model.bin")  # with the names of both
    expected = model[2].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    load_checkpoint_in_model(model, tmp_path / "model.bin", {"0": "cpu", "1": "cpu"})
    assert model[2] is model[0]
    assert torch.equal(model[2].weight, expected)
    with pytest.raises(ValueError, match=r"1\.weight doesn't have any device set"):
        load_checkpoint_in_model(model, tmp_path / "model.bin", {"2": "cpu"})


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("loaded", ["a_head", "embed"])
def test_a_tied_model_with_values_takes_those_of_the_checkpoint(loaded, place, tmp_path):
    model = nn.Module()
    model.embed, model.a_head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    model.a_head.weight = model.embed.weight
    value = torch.arange(8.0).view(4, 2)
    save_file({f"{loaded}.weight": value}, tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path / "model.safetensors", {"": place}, offload_folder=tmp_path / "disk")
    assert model.embed.weight is model.a_head.weight
    assert model.embed.weight.is_meta if place == "disk" else torch.equal(model.embed.weight, value)


def test_two_names_of_one_tensor_are_two_weights_of_a_model_without_ties(tmp_path):
    shared = torch.randn(3, 3)
    torch.save({"0.weight": shared, "1.weight": shared}, tmp_path / "pytorch_model.bin")
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    load_checkpoint_in_model(model, tmp_path)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, shared)


def test_another_shape_is_refused_before_anything_is_loaded(three_layers, tmp_path):
    model = three_layers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {**three_layers().state_dict(), "linear2.bias": torch.zeros(7)}
    with pytest.raises(CheckpointMismatchError, match=r"linear2\.bias is \[7\] in the checkpoint and \[5\]"):
        load_checkpoint_in_model(model, one_safetensors(state, tmp_path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("write", [one_safetensors, one_torch])
def test_names_of_one_side_are_logged_or_refused(three_layers, write, tmp_path, caplog):
    state = {**three_layers().state_dict(), "extra": torch.zeros(1)}
    del state["linear1.weight"]
    checkpoint = write(state, tmp_path)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(three_layers(), checkpoint)
    assert "were not used when it was loaded: extra" in caplog.text
    assert "the checkpoint lacks, and they stay as they are: linear1.weight" in caplog.text
    with pytest.raises(CheckpointMismatchError, match=r"extra; .*linear1\.weight"):
        load_checkpoint_in_model(three_layers(), checkpoint, strict=True)


def test_a_module_without_device_and_a_disk_without_folder_are_refused(three_layers, tmp_path):
    checkpoint = one_safetensors(three_layers().state_dict(), tmp_path)
    with pytest.raises(ValueError, match="doesn't have any device set"):
        load_checkpoint_in_model(three_layers(), checkpoint, {"linear1": "cpu"})
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_in_model(three_layers(), checkpoint, {"": "disk"})


@pytest.mark.parametrize("size", [4, 100, 700])
def test_a_cut_file_is_refused_whole(three_layers, size, tmp_path):
    one_safetensors(three_layers().state_dict(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    model = three_layers()
    before = model.linear1.weight.clone()
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors"):
        load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.linear1.weight, before)


class Opens:
    """Pickles as a call."""

    def __reduce__(self):
        return print, ("run",)


def test_files_that_run_code_are_refused(three_layers, tmp_path, capsys):
    torch.save({"linear1.weight": Opens()}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="run code"):
        load_checkpoint_in_model(three_layers(), tmp_path / "model.bin")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "it has no files"),
        (["notes.txt"], r"it has notes\.txt"),
        (["a.index.json", "b.index.json"], "more than one"),
    ],
)
def test_a_folder_without_one_checkpoint_is_described(three_layers, files, words, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=words):
        load_checkpoint_in_model(three_layers(), tmp_path)


def test_an_index_whose_files_are_missing_names_them(three_layers, tmp_path):
    sharded_safetensors(three_layers().state_dict(), tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"missing: model-1\.safetensors"):
        load_checkpoint_in_model(three_layers(), tmp_path)


def test_another_framework_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"format": "flax"})
    with pytest.raises(ValueError, match="saved with flax"):
        load_state_dict(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_every_dtype_is_read_as_written(dtype, tmp_path):
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "empty": torch.zeros(0, 2).to(dtype),
        "one": torch.ones(()).to(dtype),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    found = load_state_dict(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].to(torch.float32), tensor.to(torch.float32))


@pytest.mark.parametrize(
    ("shape", "length"),
    [([-4], -16), ([-2, -2], 16), ([2**62, 4], 0), ([2], 4)],
    ids=["below", "twice", "huge", "other"],
)
def test_a_header_with_an_impossible_shape_is_refused(shape, length, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, length]}}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointCorruptError, match=r"a\.safetensors: a has .* bytes, and .* by its shape"):
        load_state_dict(file)


@pytest.mark.parametrize("content", [b"", b"root:x:0:0\n", b"PK\x03\x04", b"\x80\x02."])
def test_a_file_that_is_no_checkpoint_is_named(content, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.bin"):
        load_state_dict(tmp_path / "a.bin")
