"""The choice of modules that become units."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.wrap_units import Units, find_units, parameters_of_units, units_by_size
from accel_state import PrepareError
from accel_testing.equivalence.models import TinyBlock, TinyTransformer, make_model


def found(model: nn.Module | None = None, **options: Any) -> Units:
    return find_units(model or make_model("transformer"), FSDPConfig(**options))


def only_first(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 48


def torch_style(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return isinstance(module, TinyBlock) and nonwrapped_numel > 100


BLOCKS = ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, BLOCKS),
        ({"auto_wrap_policy": "TRANSFORMER_AUTO_WRAP"}, BLOCKS),
        ({"transformer_cls_names_to_wrap": "TinyBlock"}, BLOCKS),
        ({"transformer_cls_names_to_wrap": ["TinyBlock", "TinyBlock"]}, BLOCKS),
        ({"auto_wrap_policy": "no_wrap"}, ()),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}, BLOCKS),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, ()),
        ({"auto_wrap_policy": only_first}, ("blocks.0.qkv", "blocks.1.qkv")),
        ({"auto_wrap_policy": torch_style}, BLOCKS),
    ],
)
def test_units_are_what_was_asked_for(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert sorted(found(**options).blocks) == sorted(expected)


def test_a_model_may_name_its_blocks() -> None:
    model = make_model("transformer")
    model._no_split_modules = ["TinyBlock", "ClassOfAnotherVariant"]  # type: ignore[assignment]
    assert found(model).blocks == BLOCKS


@pytest.mark.parametrize(("name", "near"), [("Tinyblock", "TinyBlock"), ("Linaer", "Linear")])
def test_a_class_that_no_module_has_is_named_with_those_that_there_are(name: str, near: str) -> None:
    with pytest.raises(PrepareError, match=f"class {name} in the model. TinyTransformer consists .*mean {near!r}"):
        found(transformer_cls_names_to_wrap=[name])


def test_what_shares_a_parameter_with_the_outside_is_no_unit() -> None:
    units = found(transformer_cls_names_to_wrap=["Embedding", "TinyBlock"])
    assert units.blocks == ("position", *BLOCKS)
    assert units.tied == ("embedding",)


def test_a_large_embedding_of_its_own_is_gathered_by_itself() -> None:
    torch.manual_seed(0)
    model = TinyTransformer(vocabulary=400)
    model.head = nn.Linear(16, 400, bias=False)
    assert found(model).extra == ("embedding",)
    assert found(model, auto_wrap_policy="NO_WRAP").extra == ()


def test_every_parameter_belongs_to_exactly_one_unit() -> None:
    model = make_model("transformer")
    groups = parameters_of_units(model, found(model))
    names = [name for members in groups.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {name.split(".")[0] for name in groups[""]} == {"embedding", "position", "norm"}


def test_units_inside_units_come_first() -> None:
    assert Units(("a", "a.b.c"), ("a.b",)).inside_out == ["a.b.c", "a.b", "a"]


@pytest.mark.parametrize(
    ("least", "found"), [(1, True), (100, True), (1000, True), (10_000, False), (1_000_000, False)]
)
def test_units_by_size_hold_enough_each(least: int, found: bool) -> None:
    model = make_model("transformer")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    units = list(units_by_size(model, least))
    assert bool(units) is found
    for unit in units:
        assert sum(size for name, size in sizes.items() if name.startswith(f"{unit}.")) >= least


def twice(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.LayerNorm))


def test_a_list_of_modules_is_never_a_unit() -> None:
    assert "blocks" not in found(auto_wrap_policy=twice).blocks


@pytest.mark.parametrize("pick", [lambda model: [model.blocks[0]], lambda model: r"blocks\.0"])
def test_nothing_in_an_ignored_module_is_a_unit(pick: Callable[[nn.Module], Any]) -> None:
    model = make_model("transformer")
    units = found(model, ignored_modules=pick(model))
    assert units.ignored == ("blocks.0",)
    assert units.blocks == ("blocks.1",)
