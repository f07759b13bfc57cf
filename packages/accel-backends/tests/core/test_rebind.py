import pytest
import torch
from torch import nn

from accel_backends import named_parameters, rebind
from accel_backends.core.rebind import state_to_device
from accel_state import PrepareError


def trained(kind=torch.optim.Adam):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    if kind is not torch.optim.LBFGS:
        optimizer.step()
    return model, optimizer


def replaced(model):
    before = named_parameters(model)
    model.weight = nn.Parameter(model.weight.detach().clone())
    return before, named_parameters(model)


def test_state_moves_over_and_lists_stay_the_same_objects():
    model, optimizer = trained()
    held, state = optimizer.param_groups[0]["params"], optimizer.state[model.weight]
    before, after = replaced(model)
    rebind(optimizer, before, after)
    assert optimizer.param_groups[0]["params"] is held
    assert held[0] is model.weight
    assert optimizer.state[model.weight]["exp_avg"] is state["exp_avg"]
    assert before["weight"] not in optimizer.state


def test_optimizers_that_hold_on_to_the_list_see_the_new_parameters():
    model, optimizer = trained(torch.optim.LBFGS)
    rebind(optimizer, *replaced(model))
    assert optimizer._params[0] is model.weight


def test_values_are_converted_for_the_new_parameter():
    model, optimizer = trained()
    before, after = replaced(model)
    rebind(optimizer, before, after, convert=lambda parameter, key, value: value * 0 if key == "exp_avg" else value)
    assert float(optimizer.state[model.weight]["exp_avg"].abs().sum()) == 0.0


def test_a_parameter_that_is_gone_is_named():
    model, optimizer = trained()
    with pytest.raises(PrepareError, match="no longer has weight, which Adam updates; it has bias"):
        rebind(optimizer, named_parameters(model), {"bias": model.bias})


def test_parameters_of_other_models_are_left_alone():
    _, optimizer = trained()
    held = list(optimizer.param_groups[0]["params"])
    rebind(optimizer, named_parameters(nn.Linear(2, 2)), named_parameters(nn.Linear(2, 2)))
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))


def test_state_follows_a_parameter_to_its_device():
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight] = {"big": torch.zeros(3), "step": torch.tensor(1.0)}
    state_to_device(optimizer)
    assert optimizer.state[model.weight]["big"].is_meta
    assert not optimizer.state[model.weight]["step"].is_meta
