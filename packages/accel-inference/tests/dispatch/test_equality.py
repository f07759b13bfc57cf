"""Models of transformers, and a UNet, give the same bits however their weights are offloaded."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.dispatch.offload import cpu_offload, cpu_offload_with_hook, disk_offload
from accel_inference.hooks.hook import remove_hook_from_submodules
from accel_inference.hooks.layerwise_casting import attach_layerwise_casting_hooks
from accel_inference.hooks.offloaded_state import get_state_dict_offloaded_model
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.module_tensors.ties import find_tied_parameters
from accel_inference.placement.sizes import direct_parts
from accel_inference.weights import mapped_files

pytest.importorskip("transformers")
from .architectures import ARCHITECTURES, GENERATING, inputs_of, make
from .unet import denoised


@pytest.fixture(autouse=True)
def _map_weights_of_any_size(monkeypatch):
    """The weights of these models would be read for their size alone, where those of larger models are mapped."""
    monkeypatch.setattr(mapped_files, "SMALL", 1)


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


def with_hook(model, _folder):
    offloaded, _ = cpu_offload_with_hook(model, "cpu")
    return offloaded


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


KINDS = [to_cpu, to_disk, little_memory, with_buffers, half_on_disk, with_hook, from_checkpoint]
RESIDENT = (half_on_disk, with_hook, mapped)


@pytest.mark.sampled(8)
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
    assert all(parameter.is_meta for parameter in offloaded.parameters()) or kind in RESIDENT


# Modules that ask for the dtype of a layer before they call it: vision models of their first convolution, T5 of ``wo``.
ASKED_FOR_DTYPES = ("embeddings", "wo")
# Layers of GPT-2 are its own Conv1D, and its head is tied to the embedding.
WITH_CAST_LAYERS = [name for name in ARCHITECTURES if name != "gpt2"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [None, to_cpu, little_memory, half_on_disk])
@pytest.mark.parametrize("name", WITH_CAST_LAYERS)
@torch.no_grad()
def test_layers_that_are_cast_give_the_bits_of_their_rounded_weights(name, kind, tmp_path):
    model, rounded = make(name), make(name)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern=ASKED_FOR_DTYPES)
    cast = [part for part, layer in model.named_modules() if hasattr(layer, "_hf_hook")]
    assert cast
    for part in cast:
        rounded.get_submodule(part).to(torch.bfloat16).to(torch.float32)
    offloaded = model if kind is None else kind(model, tmp_path)
    expected = outputs(rounded(**inputs_of(name)))
    for _ in range(2):
        for got, wanted in zip(outputs(offloaded(**inputs_of(name))), expected, strict=True):
            assert torch.equal(got, wanted)
    if name in GENERATING:
        ids, options = inputs_of(name)["input_ids"], {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(offloaded.generate(ids, **options), rounded.generate(ids, **options))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", ["8KB", "1GB"])
@pytest.mark.parametrize("kind", [*KINDS, mapped])
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5", "vit"])
def test_a_model_of_transformers_is_saved_with_its_weights_whatever_is_offloaded(name, kind, size, tmp_path):
    model = make(name)
    expected = {key: one.clone() for key, one in model.state_dict().items()}
    kind(model, tmp_path).save_pretrained(tmp_path / "saved", max_shard_size=size)
    again = type(model).from_pretrained(tmp_path / "saved")
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(one, expected[key]) for key, one in again.state_dict().items())
    assert find_tied_parameters(again) == find_tied_parameters(make(name))
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (size == "8KB")


def test_layers_that_are_cast_and_offloaded_are_saved_as_they_are_stored(tmp_path):
    model = make("llama")
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    expected = {key: one.clone() for key, one in model.state_dict().items()}
    to_disk(model, tmp_path).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(one.dtype is expected[key].dtype and torch.equal(one, expected[key]) for key, one in saved.items())


@torch.no_grad()
def test_a_state_dict_of_an_offloaded_model_is_saved_with_ties(tmp_path):
    model = make("llama-tied")
    expected = model(**inputs_of("llama-tied")).logits
    offloaded = to_disk(model, tmp_path)
    offloaded.save_pretrained(tmp_path / "saved", state_dict=get_state_dict_offloaded_model(offloaded))
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(**inputs_of("llama-tied")).logits, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [*KINDS, mapped])
@pytest.mark.parametrize("name", GENERATING)
@torch.no_grad()
def test_generated_tokens_are_the_same(name, kind, tmp_path):
    model = make(name)
    ids = {"input_ids": inputs_of(name)["input_ids"]}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**ids, **options)
    assert torch.equal(kind(model, tmp_path).generate(**ids, **options), expected)


@pytest.mark.parametrize("name", ["t5", "bart"])
@torch.no_grad()
def test_tokens_are_generated_from_an_encoder_on_one_device(name):
    """Without Accelerate, whose hooks transformers imports if a model has a device map and its encoder no hook."""
    model = make(name)
    ids = {"input_ids": inputs_of(name)["input_ids"]}
    expected = model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    placed = dispatch_model(model, {"": "cpu"})
    assert torch.equal(placed.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0), expected)
    remove_hook_from_submodules(placed)
    assert not hasattr(placed.get_encoder(), "_hf_hook")


@pytest.mark.parametrize("kind", [little_memory, pytest.param(half_on_disk, marks=pytest.mark.slow), from_checkpoint])
@torch.no_grad()
def test_an_image_is_denoised_to_the_same_bits(kind, tmp_path):
    model = make("unet")
    expected = denoised(model)
    assert torch.equal(denoised(kind(model, tmp_path)), expected)
