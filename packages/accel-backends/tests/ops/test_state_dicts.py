import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from accel_backends import load_model_state, load_optimizer_state, model_state, optimizer_state
from accel_state import CheckpointMismatchError, PrepareError

WRAPPERS = {
    "bare": lambda model: model,
    "parallel": DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "parallel compiled": lambda model: DataParallel(torch.compile(model, backend="eager")),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def train(model, optimizer, steps=2, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randint(5, (6,), generator=draw)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_models_state_has_its_own_names_and_tied_tensors_once(wrapper):
    state = model_state(WRAPPERS[wrapper](Tied()))
    assert list(state) == [
        "embed.weight",
        *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
    ]


@pytest.mark.parametrize("source", WRAPPERS)
@pytest.mark.parametrize("target", WRAPPERS)
def test_a_state_of_any_wrapping_loads_into_any_other(source, target):
    one, other = Tied(), Tied()
    load_model_state(WRAPPERS[target](other), copy.deepcopy(model_state(WRAPPERS[source](one))))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert other.head.weight is other.embed.weight


def test_a_tied_tensor_is_found_under_any_of_its_names():
    model = Tied()
    state = {("head.weight" if name == "embed.weight" else name): value for name, value in model_state(model).items()}
    state["head.weight"] = torch.full((5, 4), 7.0)
    load_model_state(model, state)
    assert float(model.embed.weight.detach().mean()) == 7.0


def test_a_plain_state_dict_with_both_names_loads():
    one, other = Tied(), Tied()
    load_model_state(other, one.state_dict())
    assert torch.equal(one.embed.weight, other.embed.weight)


def changed(state, drop=(), add=None):
    return {name: value for name, value in state.items() if name not in drop} | (add or {})


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        (["norm.bias"], {}, "it lacks norm.bias"),
        ([], {"norm.bais": torch.zeros(4)}, r"it holds unknown norm.bais \(nearest: norm.bias\)"),
        (["norm.bias"], {"norm.bias": torch.zeros(5)}, r"norm.bias is \(5,\) here and \(4,\) in the model"),
    ],
)
def test_a_state_of_another_model_is_refused_and_nothing_loaded(drop, add, words):
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.full_like(value, 9) for name, value in model_state(model).items()}
    with pytest.raises(CheckpointMismatchError, match=words):
        load_model_state(model, changed(state, drop, add))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_is_missing_or_unknown_is_returned_when_not_strict():
    model = Tied()
    state = changed(model_state(model), ["norm.bias"], {"more": torch.zeros(1)})
    assert load_model_state(model, state, strict=False) == (["norm.bias"], ["more"])


def test_extra_state_goes_by_the_module_that_has_it():
    class Counting(nn.Linear):
        count = 3

        def get_extra_state(self):
            return torch.tensor(self.count)

        def set_extra_state(self, state):
            self.count = int(state)

    one, other = (nn.Sequential(Counting(2, 2)) for _ in range(2))
    one[0].count = 5
    state = model_state(torch.compile(DataParallel(one), backend="eager"))
    assert "0._extra_state" in state
    load_model_state(other, state)
    assert other[0].count == 5


def test_extra_state_is_taken_by_its_module_although_it_has_its_memory():
    class Derived(nn.Linear):
        scale = torch.ones(2)
        largest = 0.0

        def get_extra_state(self):
            return self.scale

        def set_extra_state(self, state):
            self.scale, self.largest = state, float(state.max())

    model = Derived(2, 2)
    load_model_state(model, {**model_state(model), "_extra_state": model.scale})
    assert model.largest == 1.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.sampled(3)
def test_an_optimizer_continues_exactly_from_its_state(kind, trained):
    torch.manual_seed(0)
    one = Tied()
    first = OPTIMIZERS[kind](list(one.parameters()))
    train(one, first, trained)
    other = copy.deepcopy(one)
    second = OPTIMIZERS[kind](list(other.parameters()))
    state = copy.deepcopy(optimizer_state(first, [DataParallel(one)]))
    load_optimizer_state(second, [other], state)
    train(one, first, seed=1)
    train(other, second, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_optimizers_state_goes_by_names():
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    state = optimizer_state(optimizer, [model])
    assert set(state["state"]) == {"embed.weight", "norm.weight", "norm.bias"}
    assert [group["params"] for group in state["param_groups"]] == [["embed.weight", "norm.weight", "norm.bias"]]
    assert state["param_groups"][0]["lr"] == 0.01


def groups(model, reverse=False):
    found = [{"params": [model.embed.weight], "lr": 0.5}, {"params": list(model.norm.parameters()), "lr": 0.1}]
    return found[::-1] if reverse else found


def test_the_order_of_groups_does_not_matter():
    one, other = Tied(), Tied()
    first = torch.optim.SGD(groups(one), lr=1.0, momentum=0.9)
    train(one, first, 1)
    second = torch.optim.SGD(groups(other, reverse=True), lr=1.0, momentum=0.9)
    load_optimizer_state(second, [other], optimizer_state(first, [one]))
    assert [group["lr"] for group in second.param_groups] == [0.1, 0.5]
    assert torch.equal(
        second.state[other.embed.weight]["momentum_buffer"], first.state[one.embed.weight]["momentum_buffer"]
    )


def test_other_groups_are_refused():
    one, other = Tied(), Tied()
    state = optimizer_state(torch.optim.SGD(groups(one), lr=1.0), [one])
    with pytest.raises(CheckpointMismatchError, match="its groups differ, first at group 0"):
        load_optimizer_state(torch.optim.SGD(other.parameters(), lr=1.0), [other], state)


def test_other_parameters_are_refused():
    one, other = Tied(), nn.Linear(2, 2)
    state = optimizer_state(torch.optim.SGD(one.parameters(), lr=1.0), [one])
    with pytest.raises(CheckpointMismatchError, match=r"it lacks bias, weight; it holds unknown embed.weight"):
        load_optimizer_state(torch.optim.SGD(other.parameters(), lr=1.0), [other], state)


def test_a_parameter_of_no_model_is_named():
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    with pytest.raises(PrepareError, match=r"group 0 parameter 2 \(shape \(3,\)\)"):
        optimizer_state(torch.optim.SGD([*model.parameters(), loose], lr=1.0), [model])


def test_a_state_of_no_parameter_is_named():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["counted"] = {"steps": 3}
    with pytest.raises(PrepareError, match=r"SGD\.state has the key 'counted', which is none of its parameters"):
        optimizer_state(optimizer, [model])


def test_an_optimizer_of_two_models_tells_them_apart():
    models = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[2].parameters()], lr=1.0)
    names = optimizer_state(optimizer, models)["param_groups"][0]["params"]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert optimizer_state(torch.optim.SGD(models[1].parameters(), lr=1.0), models)["param_groups"][0]["params"] == [
        "weight",
        "bias",
    ]


def test_state_tensors_keep_their_dtype():
    class Wide(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["master"] = parameter.detach().float() + 1e-6

    one, other = (nn.Linear(2, 2).bfloat16() for _ in range(2))
    first, second = Wide(one.parameters(), lr=1.0), Wide(other.parameters(), lr=1.0)
    first.step()
    load_optimizer_state(second, [other], optimizer_state(first, [one]))
    assert second.state[other.weight]["master"].dtype is torch.float32
    assert torch.equal(second.state[other.weight]["master"], first.state[one.weight]["master"])


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(1, 4))
def test_any_split_of_parameters_into_groups_survives(order, num_groups):
    def build():
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        held = [list(model.parameters())[index] for index in order]
        split = [{"params": held[start::num_groups], "lr": 0.1 * (start + 1)} for start in range(num_groups)]
        return model, torch.optim.Adam(split)

    (one, first), (other, second) = build(), build()
    one(torch.ones(1, 2)).sum().backward()
    first.step()
    load_optimizer_state(second, [other], optimizer_state(first, [one]))
    again = optimizer_state(second, [other])
    expected = optimizer_state(first, [one])
    assert again["param_groups"] == expected["param_groups"]
    assert all(
        torch.equal(again["state"][name][key], value)
        for name, values in expected["state"].items()
        for key, value in values.items()
    )


def operations(work):
    """How many functions and methods are called."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("arrange", [nn.Sequential, lambda *layers: nn.Sequential(nn.ModuleList(layers))])
def test_loading_a_model_is_linear_in_its_parameters(arrange):
    def cost(layers):
        model = arrange(*(nn.Linear(1, 1) for _ in range(layers)))
        state = model_state(model)
        return operations(lambda: load_model_state(model, state))

    assert cost(400) < 2.5 * cost(200)


def test_numbers_of_parameters_are_looked_up_in_a_range(monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    load = torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(param, value, param_id, param_groups, key=None):
        seen.extend(type(group["params"]) for group in param_groups)
        return load(param, value, param_id, param_groups, key)

    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(noted))
    load_optimizer_state(optimizer, [model], optimizer_state(optimizer, [model]))
    assert set(seen) == {range}


def test_hooks_of_a_wide_module_see_all_that_it_is_given():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    seen = []
    model.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append(len(state)))
    load_model_state(model, model_state(model))
    assert seen == [40]


@pytest.mark.parametrize("empty", [1, 2, 3])
def test_groups_without_parameters_are_loaded(empty):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(empty):
        optimizer.add_param_group({"params": [], "lr": 0.5 + number})
    again = torch.optim.Adam(other.parameters())
    for _ in range(empty):
        again.add_param_group({"params": []})
    load_optimizer_state(again, [other], optimizer_state(optimizer, [model]))
    assert [group["lr"] for group in again.param_groups[1:]] == [0.5 + number for number in range(empty)]
    again.add_param_group({"params": []})
    with pytest.raises(CheckpointMismatchError, match="its groups differ"):
        load_optimizer_state(again, [other], optimizer_state(optimizer, [model]))


def copies(monkeypatch):
    """The modules into which torch loads something from now on."""
    loaded = []
    original = nn.Module._load_from_state_dict

    def noted(self, state_dict, *rest):
        loaded.append(self)
        return original(self, state_dict, *rest)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", noted)
    return loaded


def test_hooks_of_a_state_dict_see_detached_values_when_a_state_is_loaded():
    def look(module, state, prefix, metadata):
        state[f"{prefix}weight"].numpy()  # which torch refuses to parameters that train

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(look)
    load_model_state(model, {"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_what_lies_in_the_models_own_memory_is_not_copied_onto_itself(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held, other = model_state(model), {name: value + 1 for name, value in model_state(model).items()}
    loaded = copies(monkeypatch)
    with torch.no_grad():
        held["0.weight"].fill_(7)
    load_model_state(model, held)
    assert loaded == []
    assert model[0].weight.eq(7).all()
    load_model_state(model, {**held, "1.bias": other["1.bias"]})
    assert torch.equal(model[1].bias, other["1.bias"])


@pytest.mark.parametrize("kind", ["pre-hook", "post-hook", "method"])
def test_modules_that_look_at_what_they_are_given_see_values_in_their_place_too(kind):
    seen = []

    class Looking(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            seen.extend(state_dict)
            super()._load_from_state_dict(state_dict, prefix, *rest)

    model = nn.Sequential(Looking(2, 2) if kind == "method" else nn.Linear(2, 2))
    if kind == "pre-hook":
        model[0].register_load_state_dict_pre_hook(lambda module, state, *_: seen.extend(state))
    if kind == "post-hook":
        model[0].register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    load_model_state(model, model_state(model))
    assert seen


def repeating(first: float) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("repeated", (torch.arange(3.0) + first).view(3, 1, 1).expand(3, 4, 1).expand(3, 4, 5))
    return model


def test_a_tensor_that_repeats_its_memory_is_loaded_once():
    saved, model = repeating(7), repeating(0)
    load_model_state(model, {name: value.clone() for name, value in model_state(saved).items()})
    assert torch.equal(model.repeated, saved.repeated)
    assert model.repeated.stride() == (1, 0, 0)


def test_other_values_than_a_tensor_can_repeat_are_refused_and_nothing_loaded():
    model = repeating(0)
    before = {name: value.clone() for name, value in model_state(model).items()}
    state = {name: value + 1 for name, value in before.items()} | {"repeated": torch.randn(3, 4, 5)}
    with pytest.raises(CheckpointMismatchError, match=r"repeated repeats one value along dimensions \[1, 2\]"):
        load_model_state(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model_state(model).items())
