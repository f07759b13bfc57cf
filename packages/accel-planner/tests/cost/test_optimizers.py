"""Optimizers: states and temporary memory are those that a step makes."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_planner import optimizer_facts
from accel_planner.profile.profile import ParameterFact
from accel_state import ConfigError
from accel_testing.equivalence.models import TinyMLP


def facts_of(*parameters: nn.Parameter) -> list[ParameterFact]:
    return [ParameterFact(str(at), tuple(p.shape), p.dtype, True, 0) for at, p in enumerate(parameters)]


@pytest.mark.parametrize(
    "kind", ["sgd", "momentum", "adam", "adamw", "adafactor", "rmsprop", "adagrad", "radam", "nadam", "adamax", "asgd"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.sampled(6)
def test_predicted_states_are_those_that_a_step_makes(kind: str, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in [(), (5,), (6, 40), (3, 4, 5), (2, 7, 3, 3)]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    facts = optimizer_facts(kind, facts_of(*parameters))
    options: dict[str, Any] = {"momentum": 0.9} if kind == "momentum" else {}
    name = {"momentum": "SGD", "sgd": "SGD"}.get(kind)
    classes = {key.lower(): value for key, value in vars(torch.optim).items()}
    optimizer = (getattr(torch.optim, name) if name else classes[kind])(parameters, lr=0.1, **options)
    optimizer.step()
    for fact, parameter in zip(facts_of(*parameters), parameters, strict=True):
        made = optimizer.state.get(parameter, {}).values()
        held = sum(v.untyped_storage().nbytes() for v in made if isinstance(v, torch.Tensor))
        assert facts.state_bytes(fact, 1) == held


def test_states_of_the_parameters_shape_are_sharded_and_others_are_not() -> None:
    (fact,) = facts_of(nn.Parameter(torch.zeros(100, 40)))
    assert optimizer_facts("adam", [fact]).state_bytes(fact, 8) == 2 * 13 * 40 * 4 + 4
    assert optimizer_facts("adafactor", [fact]).state_bytes(fact, 8) == (100 + 40 + 1) * 4


def test_a_step_over_lists_takes_memory_for_all_parameters_at_once() -> None:
    parameters = facts_of(*(nn.Parameter(torch.zeros(100, 40)) for _ in range(5)))
    single, multi = (optimizer_facts("adamw", parameters, foreach=lists) for lists in (False, True))
    sizes = [(fact, fact.numel) for fact in parameters]
    assert multi.together
    assert not single.together
    assert single.scratch_bytes(sizes) <= 3 * 16000 < 5 * 16000 == multi.scratch_bytes(sizes)


def test_an_optimizer_stands_for_others_with_its_options() -> None:
    model = TinyMLP()
    facts = [
        optimizer_facts(torch.optim.SGD(model.parameters(), lr=0.1, momentum=m), facts_of(*model.parameters()))
        for m in (0, 0.9)
    ]
    first = facts_of(*model.parameters())[0]
    assert [one.state_bytes(first, 1) for one in facts] == [0, first.nbytes]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adamv", "no optimizer 'adamv'; known: adadelta, .*; did you mean 'adam'"),
        ("nowhere:Thing", "cannot be imported"),
        ("lbfgs", "cannot step on a small"),
        ("torch.optim:Nothing", "cannot be imported"),
    ],
)
def test_an_unknown_optimizer_is_refused_with_what_there_is(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer_facts(kind, facts_of(nn.Parameter(torch.zeros(3))))
