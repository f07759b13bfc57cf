"""Mapped weights are the file's bytes without a copy, and the file stays as it is whatever happens to them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.weights.loading import load_checkpoint_in_model
from accel_inference.weights.mapped_files import SMALL, MappedFiles, mapped_offloaded, may_be_mapped
from accel_inference.weights.offload_folder import indexed_weight, offload_weight
from accel_inference.weights.safetensors_header import read_header
from accel_inference.weights.sources import HostWeight
from accel_state.errors import CheckpointCorruptError

WIDTH = 128


def build():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(True)


def empty():
    with init_empty_weights():
        return build()


@pytest.fixture
def saved(tmp_path):
    """Weights by name, and the file that has them."""
    state = build().state_dict()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return state, tmp_path / "model.safetensors"


def mapped_bytes(file):
    """Ranges of this process's memory that are pages of the file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's list of mappings")


@needs_proc
def test_large_weights_are_pages_of_the_file_and_small_ones_are_read(saved):
    state, file = saved
    model = empty()
    load_checkpoint_in_model(model, file, mapped=True)
    (pages,) = mapped_bytes(file)
    assert {name: tensor.data_ptr() in pages for name, tensor in model.state_dict().items()} == {
        "0.weight": True,
        "0.bias": False,
        "1.weight": True,
        "1.bias": False,
    }
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    del model
    assert not mapped_bytes(file)


def test_training_leaves_the_file_as_it_is(saved):
    state, file = saved
    before = file.read_bytes()
    model = empty()
    load_checkpoint_in_model(model, file, mapped=True)
    plain = build()
    plain.load_state_dict(state)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters())
        each(torch.ones(3, WIDTH)).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in plain.state_dict().items())
    assert not torch.equal(model[0].weight, state["0.weight"])
    assert file.read_bytes() == before


def test_a_file_that_is_replaced_by_a_rename_stays_mapped_as_it_was(saved, tmp_path):
    state, file = saved
    model = load_checkpoint_and_dispatch(empty(), file, {"": "cpu"}, mapped=True)
    save_file({name: torch.zeros_like(tensor) for name, tensor in state.items()}, tmp_path / "other")
    (tmp_path / "other").replace(file)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_file_that_was_replaced_before_is_refused(saved, tmp_path):
    state, file = saved
    source = read_header(file)[0]["0.weight"]
    save_file(state, tmp_path / "other")
    (tmp_path / "other").replace(file)
    with pytest.raises(CheckpointCorruptError, match="was replaced or written to"):
        MappedFiles().weight(source)


@needs_proc
def test_another_dtype_is_converted_into_memory_of_its_own(saved):
    state, file = saved
    model = empty()
    load_checkpoint_in_model(model, file, dtype="bfloat16", mapped=True)
    assert torch.equal(model[0].weight, state["0.weight"].bfloat16())
    assert not mapped_bytes(file)


def test_a_second_name_of_a_tensor_does_not_share_its_memory(saved):
    state, file = saved
    source, files = read_header(file)[0]["0.weight"], MappedFiles()
    first, second = files.weight(source), files.weight(replace(source, name="alias"))
    first.read().zero_()
    assert torch.equal(second.read(), state["0.weight"])


def test_a_weight_that_its_file_does_not_align_is_read(tmp_path):
    found = read_header(_misaligned(tmp_path / "a.safetensors"))[0]["weight"]
    assert found.offset % 4
    weight = MappedFiles().weight(found)
    assert not isinstance(weight, HostWeight)
    assert torch.equal(weight.read(), torch.arange(8192.0))


def _misaligned(path):
    save_file({"weight": torch.arange(8192.0)}, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    return path


def offloaded(folder, weight, name="weight"):
    return indexed_weight(name, offload_weight(weight, name, folder)[name], folder, {})


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@needs_proc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_offloaded_weight_of_any_dtype_is_pages_of_its_file(tmp_path, dtype):
    weight = torch.randint(0, 2, (SMALL // 8, 8)).to(dtype)
    source = offloaded(tmp_path, weight)
    assert may_be_mapped(source)
    with torch.device("meta"):
        found = mapped_offloaded(source)
    (pages,) = mapped_bytes(tmp_path / "weight.dat")
    assert found.data_ptr() == pages.start
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))
    del found
    assert not mapped_bytes(tmp_path / "weight.dat")


def test_what_is_written_to_an_offloaded_weight_stays_in_the_process(tmp_path):
    source = offloaded(tmp_path, torch.ones(SMALL))
    mapped_offloaded(source).zero_()
    assert mapped_offloaded(source).unique().tolist() == [1.0]


@needs_proc
def test_mapped_weights_take_no_descriptors(tmp_path):
    sources = [offloaded(tmp_path, torch.ones(SMALL), f"weight{index}") for index in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    mapped = [mapped_offloaded(source) for source in sources]
    assert len(os.listdir("/proc/self/fd")) == before
    del mapped


@pytest.mark.parametrize(
    "change", [os.unlink, lambda path: os.truncate(path, SMALL), lambda path: os.utime(path, (1, 1))]
)
def test_an_offloaded_weight_whose_file_changed_is_refused(tmp_path, change):
    source = offloaded(tmp_path, torch.ones(SMALL))
    change(tmp_path / "weight.dat")
    with pytest.raises((CheckpointCorruptError, FileNotFoundError), match=r"weight\.dat"):
        mapped_offloaded(source)


def test_small_and_converted_weights_of_an_offload_folder_and_other_files_are_read(saved, tmp_path):
    assert not may_be_mapped(offloaded(tmp_path, torch.ones(8)))
    assert not may_be_mapped(offloaded(tmp_path, torch.ones(SMALL), "large").in_dtype(torch.bfloat16))
    assert not may_be_mapped(read_header(saved[1])[0]["0.weight"])
