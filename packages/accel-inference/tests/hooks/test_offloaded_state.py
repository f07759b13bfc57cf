"""State of offloaded models: complete, with ties, for modules that others share, and to the bit."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.hooks.hook import remove_hook_from_submodules
from accel_inference.hooks.offloaded_state import get_state_dict_offloaded_model
from accel_inference.module_tensors.access import set_module_tensor_to_device
from accel_inference.module_tensors.meta_init import init_empty_weights

X = torch.ones(2, 4)


class Block(nn.Module):
    """A layer between weights of its own; one of them has no elements."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x * self.scale + self.nothing.sum() + self.shift))


class Sharing(nn.Module):
    """One layer in two blocks, one block twice, and a head that is tied to the layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(layer), Block(nn.Linear(4, 4)), Block(layer)])
        self.blocks += [self.blocks[1], Block(nn.Linear(4, 4))]
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLACES = {"blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "blocks.4": "cpu", "head": "disk"}


def from_checkpoint(model, folder):
    tied = ("head.weight", "blocks.2.layer", "blocks.3")  # under their first names only
    state = {name: one for name, one in model.state_dict().items() if not name.startswith(tied)}
    save_file(state, folder / "model.safetensors")
    with init_empty_weights():
        empty = Sharing()
    return load_checkpoint_and_dispatch(empty, folder, PLACES, offload_folder=folder / "offload")


WAYS = {
    "cpu": lambda model, _: cpu_offload(model),
    "cpu with buffers": lambda model, _: cpu_offload(model, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder / "offload"),
    "map": lambda model, folder: dispatch_model(model, PLACES, offload_dir=folder / "offload"),
    "checkpoint": from_checkpoint,
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_the_state_of_shared_modules_has_all_names_and_their_ties(way, tmp_path):
    plain = Sharing()
    expected, names = plain(X), [*plain.state_dict()]
    offloaded = WAYS[way](copy.deepcopy(plain), tmp_path)
    assert torch.equal(offloaded(X), expected)
    state = get_state_dict_offloaded_model(offloaded)
    assert sorted(state) == sorted(names)
    assert all(torch.equal(state[name], one) for name, one in plain.state_dict().items())
    for one, other in (("blocks.0.layer.weight", "head.weight"), ("blocks.1.scale", "blocks.3.scale")):
        assert state[one].data_ptr() == state[other].data_ptr()


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_shared_modules_are_as_before_without_hooks(way, tmp_path):
    model = Sharing()
    parameters = [(name, tuple(one.shape)) for name, one in model.named_parameters()]  # each under its first name
    WAYS[way](model, tmp_path)
    remove_hook_from_submodules(model)
    assert [(name, tuple(one.shape)) for name, one in model.named_parameters()] == parameters


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_value_that_is_put_into_an_offloaded_module_is_used(way, tmp_path):
    plain = Sharing()
    offloaded = WAYS[way](copy.deepcopy(plain), tmp_path)
    for model in (plain, offloaded):
        set_module_tensor_to_device(model, "blocks.0.scale", "cpu", value=torch.tensor(3.0))
    assert torch.equal(offloaded(X), plain(X))
    assert get_state_dict_offloaded_model(offloaded)["blocks.0.scale"] == 3


class Counting(nn.Linear):
    """A layer with extra state, which is no tensor."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("kind", ["cpu", "disk", "map"])
def test_extra_state_is_in_the_state_dict(kind, tmp_path):
    model = nn.Sequential(Counting(4, 4), nn.Linear(4, 4)).eval()
    expected, output = {name: copy.deepcopy(one) for name, one in model.state_dict().items()}, model(X)
    offloaded = {
        "cpu": cpu_offload,
        "disk": lambda model: disk_offload(model, tmp_path),
        "map": lambda model: dispatch_model(model, {"0": "disk", "1": "cpu"}, main_device="cpu", offload_dir=tmp_path),
    }[kind](model)
    assert torch.equal(offloaded(X), output)
    found = get_state_dict_offloaded_model(offloaded)
    assert list(found) == list(expected)
    assert found["0._extra_state"] == {"calls": 3}
    assert all(torch.equal(found[name], one) for name, one in expected.items() if isinstance(one, torch.Tensor))
