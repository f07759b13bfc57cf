"""Models of transformers, and a UNet, give the same bits however their weights are offloaded."""

import copy

import pytest
import torch
from safetensors.torch import save_file

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.module_tensors.ties import find_tied_parameters
from accel_inference.placement.sizes import direct_parts

pytest.importorskip("transformers")
from .architectures import ARCHITECTURES, GENERATING, inputs_of, make
from .unet import denoised


def outputs(result):
    return [value for value in result.to_tuple() if isinstance(value, torch.Tensor)]


def to_cpu(model, _folder):
    return cpu_offload(model)


def to_disk(model, folder):
    return disk_offload(model, folder / "offload")


def little_memory(model, folder):
    return disk_offload(model, folder / "offload", resident_bytes=1)


def with_buffers(model, folder):
    return disk_offload(model, folder / "offload", offload_buffers=True)


def half_on_disk(model, folder):
    parts = [name for name, _ in direct_parts("", model)]
    while len(parts) == 1:
        parts = [name for name, _ in direct_parts(parts[0], model.get_submodule(parts[0]))]
    device_map = {name: "disk" if index % 2 else "cpu" for index, name in enumerate(parts)}
    return dispatch_model(model, device_map, offload_dir=folder / "offload")


def from_checkpoint(model, folder):
    return load_checkpoint_and_dispatch(
        saved_and_empty(model, folder),
        folder,
        device_map={"": "disk"},
        offload_folder=folder / "offload",
        resident_bytes=4096,
    )


def mapped(model, folder):
    empty = saved_and_empty(model, folder)
    return load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"}, mapped=True)


def saved_and_empty(model, folder):
    tied = {name for group in find_tied_parameters(model) for name in group[1:]}
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with init_empty_weights():
        return type(model)(copy.deepcopy(model.config)).eval()


KINDS = [to_cpu, to_disk, little_memory, with_buffers, half_on_disk, from_checkpoint]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", [*KINDS, mapped])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_forward_gives_the_same_bits(name, kind, tmp_path):
    model = make(name)
    expected = outputs(model(**inputs_of(name)))
    offloaded = kind(model, tmp_path)
    for _ in range(3):
        for got, wanted in zip(outputs(offloaded(**inputs_of(name))), expected, strict=True):
            assert torch.equal(got, wanted)
    assert all(parameter.is_meta for parameter in offloaded.parameters()) or kind in (half_on_disk, mapped)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GENERATING)
@torch.no_grad()
def test_generated_tokens_are_the_same(name, kind, tmp_path):
    model = make(name)
    ids = {"input_ids": inputs_of(name)["input_ids"]}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**ids, **options)
    assert torch.equal(kind(model, tmp_path).generate(**ids, **options), expected)


@pytest.mark.parametrize("kind", [little_memory, pytest.param(half_on_disk, marks=pytest.mark.slow), from_checkpoint])
@torch.no_grad()
def test_an_image_is_denoised_to_the_same_bits(kind, tmp_path):
    model = make("unet")
    expected = denoised(model)
    assert torch.equal(denoised(kind(model, tmp_path)), expected)
