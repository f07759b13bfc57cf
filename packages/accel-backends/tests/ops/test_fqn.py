import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from accel_backends import innermost, named_parameters


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)  # a user's own name, like that of a wrapper's
        self.block = nn.Linear(2, 2)

    def forward(self, x):
        return self.block(self.module(x))


NAMES = ["module.weight", "module.bias", "block.weight", "block.bias"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(DataParallel(model), backend="eager"),
        checkpoint_wrapper,
        lambda model: DataParallel(checkpoint_wrapper(model)),
    ],
    ids=["bare", "parallel", "compiled", "compiled parallel", "checkpointed", "parallel checkpointed"],
)
def test_names_are_those_of_the_author_in_any_wrapper(wrap):
    model = Inner()
    assert list(named_parameters(wrap(model))) == NAMES
    assert innermost(wrap(model)) is model


def test_wrappers_inside_are_left_out_of_names():
    model = Inner()
    model.block = torch.compile(checkpoint_wrapper(model.block), backend="eager")
    assert list(named_parameters(model)) == NAMES


def test_a_tied_parameter_comes_under_its_first_name():
    model = Inner()
    model.block.weight = model.module.weight
    assert list(named_parameters(model)) == ["module.weight", "module.bias", "block.bias"]


def test_a_shared_module_comes_under_its_first_name():
    shared = nn.Linear(2, 2)
    assert list(named_parameters(nn.ModuleDict({"a": shared, "b": shared}))) == ["a.weight", "a.bias"]


def test_a_module_that_contains_itself_ends():
    model = Inner()
    model.block.owner = model
    assert list(named_parameters(model)) == NAMES
