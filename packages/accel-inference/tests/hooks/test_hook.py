"""Hooks around a forward: what they see, what they leave, and copies of modules that have them."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from accel_inference.hooks.hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class AddOne(ModelHook):
    """Adds one to the input."""

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


class Double(ModelHook):
    """Doubles the output."""

    def post_forward(self, module, output):
        return 2 * output


class Counting(ModelHook):
    """Counts what begins and how it ends."""

    def __init__(self):
        self.begun, self.failed, self.detached = 0, 0, 0

    def pre_forward(self, module, *args, **kwargs):
        self.begun += 1
        return args, kwargs

    def failed_forward(self, module):
        self.failed += 1

    def detach_hook(self, module):
        self.detached += 1
        return module


X = torch.ones(2, 3)


def test_the_forward_keeps_its_name_and_signature(three_layers):
    model = three_layers()
    before = inspect.signature(model.forward)
    add_hook_to_module(model, ModelHook())
    assert model.forward.__name__ == "forward"
    assert inspect.signature(model.forward) == before
    remove_hook_from_module(model)
    assert "forward" not in model.__dict__
    assert not hasattr(model, "_hf_hook")
    assert not hasattr(model, "_old_forward")


def test_hooks_change_inputs_and_outputs():
    layer = nn.Linear(3, 4)
    expected = layer(X + 1)
    add_hook_to_module(layer, AddOne())
    assert torch.equal(layer(X), expected)
    add_hook_to_module(layer, Double(), append=True)
    assert torch.equal(layer(X), 2 * expected)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert len(layer._hf_hook.hooks) == 2
    add_hook_to_module(layer, AddOne())
    assert torch.equal(layer(X), expected)


def test_no_grad_of_a_hook_leaves_no_record():
    layer = nn.Linear(3, 4)
    hook = ModelHook()
    add_hook_to_module(layer, hook)
    assert layer(X).requires_grad
    hook.no_grad = True
    assert not layer(X).requires_grad


def test_a_failed_forward_is_told_to_every_hook():
    layer = nn.Linear(3, 4)
    first, second = Counting(), Counting()
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, second, append=True)
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.ones(2, 5))
    assert [(hook.begun, hook.failed) for hook in (first, second)] == [(1, 1), (1, 1)]
    remove_hook_from_module(layer)
    assert (first.detached, second.detached) == (1, 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_forward(duplicate):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    add_hook_to_module(model[0], AddOne())
    expected = model(X)
    made = duplicate(model)
    assert torch.equal(made(X), expected)
    with torch.no_grad():
        made[0].weight.zero_()
    assert torch.equal(model(X), expected)
    assert not torch.equal(made(X), expected)
    remove_hook_from_submodules(made)
    assert not hasattr(made[0], "_hf_hook")


def test_a_container_with_a_hook_pickles_and_copies():
    model = nn.ModuleList([nn.Linear(3, 4)])  # its forward is a function that torch calls _forward_unimplemented
    add_hook_to_module(model, ModelHook())
    made = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with pytest.raises(NotImplementedError, match="ModuleList"):
        made(X)
    remove_hook_from_submodules(made)
    assert made.__dict__.keys() == nn.ModuleList().__dict__.keys()


def test_a_graph_module_can_be_recompiled():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    expected, shifted = graph(X), graph(X + 1)
    add_hook_to_module(graph, AddOne())
    assert torch.equal(graph(X), shifted)
    remove_hook_from_module(graph)
    assert torch.equal(graph(X), expected)
    graph.recompile()
    assert torch.equal(graph(X), expected)
