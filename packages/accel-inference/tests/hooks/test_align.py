"""Hooks that place weights, and the state of offloaded modules."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.hooks.align import AlignDevicesHook
from accel_inference.hooks.attach import attach_align_device_hook
from accel_inference.hooks.hook import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_inference.hooks.layerwise_casting import attach_layerwise_casting_hooks
from accel_inference.hooks.offloaded_state import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from accel_inference.hooks.turns import CpuOffload
from accel_inference.module_tensors.access import named_module_tensors
from accel_inference.prefetch.weights_map import OffloadedWeightsLoader
from accel_inference.weights.offload_folder import offload_state_dict
from accel_state.errors import CheckpointMismatchError

X = torch.ones(2, 3)


@pytest.fixture
def model(three_layers):
    return three_layers().eval()


def devices(model):
    return {name: tensor.device.type for name, tensor in named_module_tensors(model, recurse=True)}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_weights_are_there_only_while_a_module_computes(model, offload_buffers):
    expected = model(X)
    attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=offload_buffers)
    on_meta = {name for name, device in devices(model).items() if device == "meta"}
    assert {"linear1.weight", "batchnorm.bias"} <= on_meta
    assert ("batchnorm.running_mean" in on_meta) == offload_buffers
    assert torch.equal(model(X), expected)
    assert {name for name, device in devices(model).items() if device == "meta"} == on_meta
    remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model(X), expected)


def test_attributes_are_the_arguments_of_the_constructor():
    hook = AlignDevicesHook("cpu", skip_keys="past")
    names = [name for name in inspect.signature(AlignDevicesHook).parameters if name not in vars(hook)]
    assert names == []


def test_a_failed_forward_leaves_no_weights(model):
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(2, 7))
    assert model.linear1.weight.is_meta
    assert model(X).shape == (2, 5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_offloaded_model_computes_on_its_own(model, duplicate, tmp_path):
    expected = model(X)
    offload_state_dict(tmp_path, model.state_dict())
    attach_align_device_hook(model, "cpu", True, OffloadedWeightsLoader(save_folder=tmp_path))
    assert torch.equal(model(X), expected)
    made = duplicate(model)
    results = {}

    def compute(name, part):
        for _ in range(20):
            results[name] = part(X)

    threads = [threading.Thread(target=compute, args=pair) for pair in (("own", model), ("copy", made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results["own"], expected)
    assert torch.equal(results["copy"], expected)
    assert made.linear1._hf_hook is not model.linear1._hf_hook


@pytest.mark.parametrize("kept", ["on disk", "in a small dtype"])
def test_two_threads_in_one_model_get_right_results_or_a_refusal(model, kept, tmp_path):
    if kept == "on disk":
        offload_state_dict(tmp_path, model.state_dict())
        attach_align_device_hook(model, "cpu", True, OffloadedWeightsLoader(save_folder=tmp_path))
    else:
        attach_layerwise_casting_hooks(model, torch.float16, torch.float32)
    expected = model(X)
    wrong, refused = [], []

    def compute():
        for _ in range(50):
            try:
                wrong.append(not torch.equal(model(X), expected))
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert all("another thread" in text for text in refused)
    assert torch.equal(model(X), expected)


class Counting(nn.Module):
    """Counts its forwards in buffers: in place, and in a new tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("again", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        self.again = self.again + 1
        return self.linear(x) + self.seen + self.again


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_an_offloaded_buffer_that_a_forward_changes_keeps_its_value(offload, inference, tmp_path):
    model = Counting().eval()
    plain = copy.deepcopy(model)
    model.register_buffer("shift", torch.ones(1))
    place = (tmp_path,) if offload is disk_offload else ()
    offload(model, *place, offload_buffers=True, resident_bytes=1)
    for _ in range(3):
        with torch.inference_mode(inference):
            assert torch.equal(model(X), plain(X))
    assert model.shift.is_meta  # nothing has changed it
    state = get_state_dict_offloaded_model(model)
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    for seen in (state["seen"], state["again"], model.seen, copied.seen):
        assert seen.item() == 3
    assert torch.equal(model(X), plain(X))
    assert not model.again.is_inference()


def test_a_module_that_computes_inside_itself_keeps_its_weights():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, depth=2):
            inner = self(x, depth - 1) if depth else x
            return inner * self.weight

    module = Nested()
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    assert torch.equal(module(X), X)
    assert module.weight.is_meta


def test_weights_that_the_map_lacks_are_named(model):
    weights = OffloadedWeightsLoader(state_dict={"linear1.weight": torch.ones(4, 3)})
    with pytest.raises(CheckpointMismatchError, match=r"lack linear1\.bias of a Linear"):
        attach_align_device_hook(model, "cpu", True, weights)


def test_any_mapping_serves_as_weights(model):
    expected = model(X)
    attach_align_device_hook(model, "cpu", True, dict(model.state_dict()))
    assert torch.equal(model(X), expected)
    assert model.linear2.weight.is_meta


def test_gradients_flow_through_offloaded_weights_to_the_input(model, tmp_path):
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    expected = x.grad.clone()
    offload_state_dict(tmp_path, model.state_dict())
    attach_align_device_hook(model, "cpu", True, OffloadedWeightsLoader(save_folder=tmp_path, resident_bytes=1))
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_only_offloading_hooks_count_as_offload(model):
    assert not has_offloaded_params(model.linear1)
    add_hook_to_module(model.linear1, AlignDevicesHook("cpu"))
    assert not has_offloaded_params(model.linear1)
    add_hook_to_module(model.linear1, AlignDevicesHook("cpu", offload=True))
    assert has_offloaded_params(model.linear1)
    plain = nn.Linear(3, 4)
    add_hook_to_module(plain, CpuOffload("cpu"))
    assert not has_offloaded_params(plain)


@pytest.mark.parametrize("offload", [False, True])
def test_a_module_is_on_a_device_inside_the_context(model, offload):
    attach_align_device_hook(model, "cpu", offload)
    with align_module_device(model.linear1):
        assert model.linear1.weight.device.type == "cpu"
    with align_module_device(model.linear1, "cpu"):
        assert model.linear1.weight.device.type == "cpu"
    assert model.linear1.weight.is_meta == offload


def test_changes_inside_the_context_stay_in_host_memory(model):
    attach_align_device_hook(model, "cpu", True)
    with align_module_device(model.linear1), torch.no_grad():
        model.linear1.weight.fill_(3)
    with align_module_device(model.linear1):
        assert model.linear1.weight.unique().tolist() == [3]


def test_the_state_dict_of_an_offloaded_model_is_complete(model):
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", True)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    part = get_state_dict_from_offload(model.linear1, "linear1.weight", {"linear1.weight": "", "linear2.weight": ""})
    assert torch.equal(part["linear1.weight"], expected["linear1.weight"])
    assert part["linear2.weight"] == ""


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn])
def test_layers_are_stored_in_a_small_dtype_and_compute_in_another(model, storage):
    attach_layerwise_casting_hooks(model, storage, torch.float32, skip_modules_pattern="linear2")
    assert model(X).dtype == torch.float32
    assert {name: tensor.dtype for name, tensor in model.named_parameters() if "weight" in name} == {
        "linear1.weight": storage,
        "batchnorm.weight": torch.float32,
        "linear2.weight": torch.float32,
    }


def test_a_hook_in_the_place_of_one_that_offloads_leaves_the_weights(model):
    expected, requires = model(X), model.linear1.weight.requires_grad
    attach_align_device_hook(model, "cpu", True)
    add_hook_to_module(model.linear1, ModelHook())
    assert not model.linear1.weight.is_meta
    assert model.linear1.weight.requires_grad == requires
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn])
def test_layers_that_are_cast_are_offloaded_as_they_are_stored(model, storage, tmp_path):
    attach_layerwise_casting_hooks(model, storage, torch.float32)
    expected = model(X)
    disk_offload(model, tmp_path)
    assert (tmp_path / "linear1.weight.dat").stat().st_size == model.linear1.weight.numel() * storage.itemsize
    for _ in range(2):
        assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert torch.equal(model(X), expected)


def test_a_layer_that_shares_its_weight_with_an_embedding_is_not_cast():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32)
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float16, torch.float32]
    assert model(torch.arange(5)).dtype is torch.float32


def test_layers_that_are_offloaded_are_not_cast_afterwards(model):
    cpu_offload(model)
    with pytest.raises(ValueError, match=r"2 of 2 layers are offloaded already.*attach layerwise casting first"):
        attach_layerwise_casting_hooks(model, torch.float16, torch.float32)


class Adapted(nn.Module):
    """An adapter as peft makes it: where the layer's weights are."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, layer.out_features, bias=False, device=layer.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.down(x)


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_weights_that_nothing_fills_are_refused_by_name(model, way, tmp_path):
    if way == "map":
        dispatch_model(model, {name: "disk" for name, _ in model.named_children()}, offload_dir=tmp_path)
    else:
        cpu_offload(model) if way == "cpu" else disk_offload(model, tmp_path)
    before = model(X)
    name = next(name for name, one in model.named_modules() if isinstance(one, nn.Linear))
    model.set_submodule(name, Adapted(model.get_submodule(name)))
    for _ in range(2):  # and nothing stays onloaded after the first error
        with pytest.raises(
            RuntimeError, match=rf"^{name}\.down\.weight have no values: their modules were added after"
        ):
            model(X)
    nn.init.zeros_(model.get_submodule(name).down.to_empty(device="cpu").weight)
    assert torch.equal(model(X), before)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_a_weight_that_a_pre_hook_computes_is_refused(way, tmp_path):
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3, bias=False)), nn.Linear(3, 2)).eval()
    expected = model(X)
    cpu_offload(model) if way == "cpu" else disk_offload(model, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^weight of a Linear has no values: a forward pre-hook \(WeightNorm\)"):
            model(X)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)
