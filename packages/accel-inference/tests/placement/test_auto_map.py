"""Automatic device maps: the maps that users of Accelerate rely on, and properties of every map."""

import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_inference.dispatch.load import automatic_map
from accel_inference.module_tensors.ties import device_of, find_tied_parameters
from accel_inference.placement.auto_map import infer_auto_device_map
from accel_inference.placement.device_map import check_device_map
from accel_inference.placement.sizes import compute_module_sizes, layers

pytestmark = pytest.mark.leaks("threads")


@pytest.fixture(autouse=True)
def no_missing_devices(caplog):
    caplog.set_level(logging.ERROR, "accel_inference.placement.budgets")


def named(**modules):
    return nn.Sequential(OrderedDict(modules))


@pytest.mark.parametrize("budgets", [{0: 200, 1: 200}, {0: 200, 1: 172, 2: 200}])
def test_the_first_device_keeps_room_for_the_largest_layer(three_layers, budgets):
    assert infer_auto_device_map(three_layers(), budgets) == {"linear1": 0, "batchnorm": 1, "linear2": 1}


def test_tied_layers_go_to_one_device(three_layers):
    model = three_layers()
    model.linear1.weight = model.linear2.weight
    assert infer_auto_device_map(model, {0: 200, 1: 200}) == {"": 0}


@pytest.mark.parametrize(
    ("unsplittable", "expected"),
    [
        (None, {"0": 0, "1.linear1": 0, "1.batchnorm": 0, "1.linear2": 1, "2": 1}),
        (["ThreeLayers"], {"0": 0, "1": 1, "2": 1}),
        ("ThreeLayers", {"0": 0, "1": 1, "2": 1}),
        ({"ThreeLayers"}, {"0": 0, "1": 1, "2": 1}),
    ],
)
def test_a_module_without_room_is_divided_unless_its_class_may_not_be(three_layers, unsplittable, expected):
    model = nn.Sequential(*(three_layers() for _ in range(3)))
    assert infer_auto_device_map(model, {0: 500, 1: 500}, no_split_module_classes=unsplittable) == expected


def test_a_tied_layer_is_taken_out_of_its_block(three_layers):
    model = named(layer1=three_layers(), layer2=three_layers(), layer3=three_layers())
    model.layer3.linear2.weight = model.layer1.linear2.weight
    assert infer_auto_device_map(model, {0: 400, 1: 500}) == {
        "layer1": 0,
        "layer3.linear2": 0,
        "layer2": 1,
        "layer3.linear1": 1,
        "layer3.batchnorm": 1,
    }


def test_layers_tied_with_weight_and_bias_leave_room_to_others():
    model = named(linear1=nn.Linear(4, 4), linear2=nn.Linear(6, 6), linear3=nn.Linear(4, 4), linear4=nn.Linear(6, 6))
    model.linear3.weight, model.linear3.bias = model.linear1.weight, model.linear1.bias
    expected = {"linear1": 0, "linear2": 1, "linear3": 0, "linear4": 1}
    assert infer_auto_device_map(model, {0: 250, 1: 400}) == expected


def test_names_with_a_common_beginning_are_not_confused():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
    model[11].weight = model[1].weight
    found = infer_auto_device_map(model, {0: 32, 1: 1000}, clean_result=False)
    assert found == {"0": 0, **{str(index): 1 for index in range(1, 12)}}


def with_buffers():
    model = named(linear1=nn.Linear(3, 4), batchnorm=nn.BatchNorm1d(4), linear2=nn.Linear(4, 5))
    for layer, length in zip(model, (20, 40, 30), strict=True):
        layer.register_buffer("extra", torch.zeros(length))
    return model


def test_buffers_of_offloaded_layers_without_room_are_warned_of():
    with pytest.warns(UserWarning, match="Current model requires .* bytes of buffer for offloaded layers"):
        found = infer_auto_device_map(with_buffers(), {0: 400, "cpu": "1GB"})
    assert found == {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infer_auto_device_map(with_buffers(), {0: 400, "cpu": "1GB"}, offload_buffers=True) == found


def test_an_empty_device_takes_a_later_layer_on_request(caplog):
    caplog.set_level(logging.INFO, "accel_inference.placement.auto_map")
    model = named(module=named(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4), linear3=nn.Linear(4, 8)))
    assert infer_auto_device_map(model, {0: 256}) == {"": "disk"}
    assert "insufficient memory" in caplog.text
    caplog.clear()
    expected = {"module.linear1": "disk", "module.linear2": 0, "module.linear3": "disk"}
    assert infer_auto_device_map(model, {0: 256}, fallback_allocation=True) == expected
    assert not caplog.text


def test_without_a_limit_everything_is_on_the_host_if_there_is_no_accelerator(three_layers):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert infer_auto_device_map(three_layers()) == {"": "cpu"}


@st.composite
def modules(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return nn.Linear(draw(st.integers(1, 8)), draw(st.integers(1, 8)), bias=draw(st.booleans()), device="meta")
    made = nn.Sequential(*draw(st.lists(modules(depth=depth - 1), min_size=1, max_size=4)))
    if draw(st.integers(0, 4)) == 0:
        made.register_parameter("own", nn.Parameter(torch.zeros(draw(st.integers(1, 20)), device="meta")))
    if draw(st.integers(0, 4)) == 0:
        made.register_buffer("kept", torch.zeros(draw(st.integers(1, 20)), device="meta"))
    return made


@st.composite
def models(draw):
    model = nn.Sequential(*draw(st.lists(modules(), min_size=1, max_size=4)))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for first, second in draw(st.lists(st.tuples(st.sampled_from(linear), st.sampled_from(linear)), max_size=2)):
        second.weight = first.weight
    return model


budgets = st.dictionaries(st.sampled_from([0, 1, 2, "cpu"]), st.integers(0, 2000), min_size=1)


@settings(max_examples=150, deadline=None)
@given(model=models(), given_budgets=budgets, fallback=st.booleans())
def test_every_tensor_is_placed_once_and_no_device_is_over_its_budget(model, given_budgets, fallback):
    found = infer_auto_device_map(
        model, given_budgets, clean_result=False, offload_buffers=True, fallback_allocation=fallback
    )
    check_device_map(model, found)
    for name in found:
        assert not any(other != name and f"{other}.".startswith(f"{name}.") for other in found)
    sizes = compute_module_sizes(model)
    for device, budget in given_budgets.items():
        held = {
            id(tensor): tensor.numel() * tensor.element_size()
            for name, tensor in [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
            if device_of(name, found) == device
        }
        assert sum(held.values()) <= budget
    assert found == infer_auto_device_map(
        model, given_budgets, clean_result=False, offload_buffers=True, fallback_allocation=fallback
    )
    assert sizes[""] >= max((sizes[name] for name in found), default=0)


@settings(max_examples=100, deadline=None)
@given(model=models(), given_budgets=budgets)
def test_the_cleaned_map_means_the_same(model, given_budgets):
    full = infer_auto_device_map(model, given_budgets, clean_result=False, offload_buffers=True)
    short = infer_auto_device_map(model, given_budgets, offload_buffers=True)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [device_of(name, full) for name in names] == [device_of(name, short) for name in names]
    assert len(short) <= len(full)


@settings(max_examples=100, deadline=None)
@given(model=models())
def test_layers_divide_a_model_without_rest(model):
    inside = [
        tensor
        for _, part in layers([("", model)], ())
        for tensor in ([part] if torch.is_tensor(part) else part.parameters())
    ]
    assert {id(tensor) for tensor in inside} == {id(tensor) for tensor in model.parameters()}


@settings(max_examples=100, deadline=None)
@given(model=models())
def test_tied_names_are_one_parameter(model):
    for group in find_tied_parameters(model):
        assert len({id(model.get_parameter(name)) for name in group}) == 1


def test_each_device_keeps_room_for_the_activations_of_its_modules():
    model = named(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), d=nn.Linear(4, 4))  # 80 bytes each
    budgets = {0: 240, 1: 240, "cpu": 1000}
    assert infer_auto_device_map(model, budgets) == {"a": 0, "b": 0, "c": 1, "d": 1}
    found = infer_auto_device_map(model, budgets, activations={"a": 10, "b": 70, "c": 10, "d": 120})
    # The first device of a map would compute what is offloaded: 80 bytes of a layer and 120 of activations leave 40.
    assert found == {"": "cpu"}
    assert infer_auto_device_map(model, {0: 240, 1: 310}, activations={"a": 10, "b": 70, "c": 10, "d": 60}) == {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 1,
    }


@given(
    activations=st.lists(st.integers(0, 400), min_size=4, max_size=4),
    budgets=st.lists(st.integers(0, 900), min_size=2, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_weights_and_activations_of_no_device_exceed_its_budget(activations, budgets):
    """The first device of the map also computes what is offloaded, one layer at a time."""
    model = named(**{name: nn.Linear(4, 4) for name in "abcd"})
    needed = dict(zip("abcd", activations, strict=True))
    found = infer_auto_device_map(model, {0: budgets[0], 1: budgets[1], "cpu": 10_000}, activations=needed)
    places = {name: device_of(name, found) for name in "abcd"}
    offloaded = [name for name, place in places.items() if place == "cpu"]
    computing = min((place for place in places.values() if place != "cpu"), default=None)
    for device in {0, 1} & set(places.values()):
        here = [name for name, place in places.items() if place == device]
        loaded = offloaded if device == computing else []
        weights = 80 * len(here) + (80 if loaded else 0)
        assert weights + max(needed[name] for name in [*here, *loaded]) <= budgets[device]


@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_shares_of_the_weights_keep_the_activations_beside_them(way):
    model = named(**{name: nn.Linear(4, 4) for name in "abcdefghij"})
    needed = dict.fromkeys("abcdefghij", 300)
    options = {"no_split_module_classes": None, "dtype": None}
    found = automatic_map(model, way, max_memory={0: 900, 1: 1100, "cpu": 10_000}, activations=needed, **options)
    assert "cpu" not in {device_of(name, found) for name in needed}


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        ({"linear3": 5}, "activations names 'linear3'.*did you mean 'linear"),
        ({"linear1": -1}, "'linear1' are -1 bytes"),
    ],
)
def test_wrong_activations_are_named(three_layers, activations, said):
    with pytest.raises(ValueError, match=said):
        infer_auto_device_map(three_layers(), {0: 200}, activations=activations)


def test_a_parameter_that_a_module_holds_twice_counts_once_with_the_one_it_is_tied_to():
    inner = named(x=nn.Linear(4, 4, bias=False), y=nn.Linear(4, 4, bias=False), z=nn.Linear(4, 4, bias=False))
    model = named(a=nn.Linear(4, 4, bias=False), b=inner)
    inner.x.weight = inner.y.weight = model.a.weight  # 64 bytes, beside 64 of z
    assert infer_auto_device_map(model, {0: 0, 1: 127, "cpu": 1000}) == {"a": 1, "b.x": 1, "b.y": 1, "b.z": "cpu"}
    assert infer_auto_device_map(model, {0: 0, 1: 128, "cpu": 1000}) == {"": 1}
