"""What cannot be served is refused before the model is touched; an error in the middle leaves nothing half-loaded."""

import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.weights.loading import load_checkpoint_in_model, load_weights
from accel_inference.weights.sources import FormatWeight
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from accel_testing.faults.faults import limited_file_size

X = torch.ones(2, 3)
HALF = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}


@pytest.fixture
def model(three_layers):
    return three_layers().eval()


def damaged_in_the_middle(model):
    """Weights for a model, of which the last ones cannot be read."""
    state = model.state_dict()

    def reader(name):
        if name.startswith("linear2"):
            raise CheckpointCorruptError(f"{name} is damaged")
        return state[name]

    return {
        name: FormatWeight(lambda one=name: reader(one), tuple(tensor.shape), tensor.dtype, tensor.dtype)
        for name, tensor in state.items()
    }


def test_an_empty_model_is_empty_after_a_damaged_weight(three_layers):
    with init_empty_weights():
        model = three_layers()
        model.linear1.again = model.linear1.weight
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(CheckpointCorruptError, match=r"linear2\.weight is damaged"):
        load_weights(model, damaged_in_the_middle(three_layers()))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is tensor for name, tensor in before.items())


def test_a_model_with_weights_does_not_compute_with_those_of_two_checkpoints(model, three_layers):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointCorruptError, match=r"linear2\.weight is damaged"):
        load_weights(model, damaged_in_the_middle(three_layers()))
    state = model.state_dict()
    assert {name for name, tensor in state.items() if tensor.is_meta} == {
        name for name in state if "linear2" not in name
    }
    assert all(tensor.is_meta or torch.equal(tensor, before[name]) for name, tensor in state.items())


@pytest.mark.parametrize("limit", [100, 20_000])  # the first weight does not fit; the index does not
def test_a_full_offload_folder_leaves_the_model_as_it_was(limit, tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(300 if limit > 100 else 2))).eval()
    torch.save(model.state_dict(), tmp_path / "model.bin")
    before = dict(model.named_parameters())
    with limited_file_size(limit), pytest.raises(CheckpointError, match="File too large"):
        load_checkpoint_in_model(model, tmp_path / "model.bin", {"": "disk"}, offload_folder=tmp_path / "offload")
    with limited_file_size(limit), pytest.raises(CheckpointError, match="File too large"):
        disk_offload(model, tmp_path / "other")
    assert all(model.get_parameter(name) is tensor for name, tensor in before.items())
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_weights_that_others_replace_are_not_kept_until_the_end(model):
    first, alive = weakref.ref(model.linear1.weight), []

    def reader(tensor):
        alive.append(first() is not None)
        return torch.zeros_like(tensor)

    sources = {
        name: FormatWeight(lambda one=tensor: reader(one), tuple(tensor.shape), tensor.dtype, tensor.dtype)
        for name, tensor in ((name, tensor.clone()) for name, tensor in model.state_dict().items())
    }
    load_weights(model, sources)
    assert alive == [True] + [False] * (len(sources) - 1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"linear1.weight": torch.ones(4, 3)}, r"lack linear1\.bias, .*they have linear1\.weight"),
        ({"linear2.weight": torch.ones(7, 4)}, r"linear2\.weight is \[7, 4\] among the offloaded weights and \[5, 4\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_the_model_is_touched(model, state, said):
    expected = model(X)
    full = state if "linear1.weight" in state else {**model.state_dict(), **state}
    with pytest.raises(CheckpointMismatchError, match=said):
        cpu_offload(model, state_dict=full)
    if "linear2.weight" in state:
        with pytest.raises(CheckpointMismatchError, match=said):
            dispatch_model(model, {"": "disk"}, state_dict=full)
    assert torch.equal(model(X), expected)
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())


@pytest.mark.parametrize("again", [cpu_offload, lambda model: dispatch_model(model, HALF, offload_dir="/nowhere")])
def test_a_model_that_is_offloaded_already_says_what_to_do(model, again):
    expected = model(X)
    cpu_offload(model)
    with pytest.raises(CheckpointMismatchError, match="remove_hook_from_submodules"):
        again(model)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("dsk", r"linear2 is on 'dsk' by the device map, .* expected 'cpu', 'disk'"),
        pytest.param(
            "cuda:0",
            r"linear2 is on 'cuda:0' by the device map, which is no device of this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_a_device_that_the_machine_lacks_is_named_before_the_model_is_touched(model, device, said, tmp_path):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        dispatch_model(model, HALF | {"linear2": device}, offload_dir=tmp_path)
    with pytest.raises(ValueError, match=said):
        load_checkpoint_and_dispatch(model, tmp_path, HALF | {"linear2": device}, offload_folder=tmp_path / "offload")
    with pytest.raises(ValueError, match="main_device is on"):
        dispatch_model(model, HALF, main_device=device, offload_dir=tmp_path)
    with pytest.raises(ValueError, match="the model is on"):
        cpu_offload(model, device)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())


@pytest.mark.parametrize("given", [-1, 1.5, "1GB"])
def test_a_budget_that_is_no_number_of_bytes_is_named(model, given, tmp_path):
    with pytest.raises(ValueError, match=r"resident_bytes is .*; expected a number of bytes from 0"):
        disk_offload(model, tmp_path, resident_bytes=given)
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())
