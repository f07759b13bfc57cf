import enum
import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

import accel_ckpt
from accel_ckpt.format.tree import TensorTable, decode, encode, leaves, tensor_name
from accel_state.errors import CheckpointCorruptError, CheckpointError

numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
trees = st.recursive(
    numbers,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def through_json(tree: Any) -> Any:
    document = json.loads(json.dumps(encode(tree, "x", TensorTable()), allow_nan=False))
    return decode(document, lambda key, path: key)


@given(trees)
def test_everything_comes_back_as_it_was(tree: Any) -> None:
    assert repr(through_json(tree)) == repr(tree)


@pytest.mark.parametrize(
    "number", [2**63, -(2**200), 2**53 + 1, 1 << 20_000, 0, -1], ids=lambda n: f"{n.bit_length()}bits"
)
def test_integers_of_any_length_come_back(number: int) -> None:
    assert through_json({"n": number}) == {"n": number}


def test_integers_that_doubles_cannot_hold_are_written_as_text() -> None:
    assert encode(2**53 + 1, "x", None) == {"$int": "0x20000000000001"}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_floats_come_back_bit_for_bit(value: float) -> None:
    assert repr(through_json([value])) == repr([value])


@pytest.mark.parametrize(
    "tree",
    [{1: "a", "1": "b"}, {True: 1, "True": 2}, {None: 1}, {"$tensor": "no tensor"}, {"$x": {"$y": 1}}, {1.5: ()}, {}],
    ids=str,
)
def test_keys_keep_their_types(tree: Any) -> None:
    back = through_json(tree)
    assert back == tree
    assert [type(key) for key in back] == [type(key) for key in tree]


class Mode(str, enum.Enum):
    MIN = "min"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(2**40), 2**40),
        (np.bool_(True), True),
        (np.float64("nan"), math.nan),
        (Mode.MIN, "min"),
        ({Mode.MIN: Mode.MIN, "other": {Mode.MIN: 1, 2: 3}}, {"min": "min", "other": {"min": 1, 2: 3}}),
        (OrderedDict(a=1), {"a": 1}),
        (torch.Size([2, 3]), (2, 3)),
    ],
    ids=str,
)
def test_values_that_are_nearly_plain_become_plain(value: Any, plain: Any) -> None:
    back = through_json(value)
    assert repr(back) == repr(plain)
    assert type(back) is type(plain)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "x/a/0 is a builtins.object"),
        (b"abc", "torch.frombuffer"),
        (np.zeros(2), "torch.from_numpy"),
        ({1, 2}, "sorted"),
        (torch.nn.Linear(1, 1), "state_dict"),
        (1j, "builtins.complex"),
        (np.datetime64(1, "ns"), r"numpy\.datetime64"),
        (torch.nn.LazyLinear(2).weight, "call the model once"),
    ],
    ids=["object", "bytes", "array", "set", "module", "complex", "date", "lazy"],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        encode({"a": [value]}, "x", TensorTable())
    assert "x/a/0" in str(caught.value)


def test_a_state_may_be_called_by_a_string_enumeration(tmp_path):
    saved = accel_ckpt.save(tmp_path / "c", {Mode.MIN: {"w": torch.ones(2)}}, local={Mode.MIN: 1})
    assert (saved.names, [*saved.manifest.tensors]) == (["min"], ["min/w"])
    assert saved.read_local("min", 0) == 1


def test_a_key_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x/a has the key \(1, 2\) of type tuple"):
        encode({"a": {(1, 2): 3}}, "x", None)


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contain itself"):
        encode(tree, "x", None)


def test_tensors_in_metadata_are_refused() -> None:
    with pytest.raises(CheckpointError, match="metadata/loss is a tensor"):
        encode({"loss": torch.ones(())}, "metadata", None)


def test_tied_tensors_are_listed_once() -> None:
    weight = torch.randn(3, 2)
    table = TensorTable()
    document = encode(
        {"embedding": weight, "head": weight.view(3, 2), "other": weight.t(), "row": weight[0]}, "m", table
    )
    assert document["embedding"] == document["head"] == {"$tensor": "m/embedding"}
    assert list(table.tensors) == ["m/embedding", "m/other", "m/row"]


@given(st.lists(keys, min_size=1).map(tuple), st.lists(keys, min_size=1).map(tuple))
def test_different_places_have_different_names(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    typed = [[(type(key), key) for key in path] for path in (one, other)]
    assert (tensor_name(one) == tensor_name(other)) == (repr(typed[0]) == repr(typed[1]))


def test_leaves_are_found_by_their_places() -> None:
    assert leaves({"a": [1, (2,)], 3: {}}) == {("a", 0): 1, ("a", 1, 0): 2}


@pytest.mark.parametrize(
    "document",
    [
        {"$float": "x"},
        {"$int": 5},
        {"$tuple": 5},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$unknown": 1},
        {"$tensor": 1},
    ],
    ids=str,
)
def test_ill_formed_documents_are_refused(document: Any) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode(document, lambda key, path: key)


def test_a_negated_view_is_another_tensor_than_its_base(tmp_path):
    base = torch.tensor([1 + 2j, 3 - 4j])
    negated = base.conj().imag  # the memory of base.imag, read with the other sign
    assert negated.is_neg()
    read = accel_ckpt.save(tmp_path / "c", {"s": {"base": base.imag, "negated": negated}}).read("s")
    assert read["base"].tolist() == [2.0, -4.0]
    assert read["negated"].tolist() == [-2.0, 4.0]


def test_states_of_an_8_bit_optimizer_are_refused_with_the_nearest_that_is_saved(tmp_path):
    """Those of ``torchao.optim.AdamW8bit`` are made of codes and scales."""
    with pytest.raises(CheckpointError, match=r"exp_avg is a .*TwoTensor, a tensor made of others.* torch.optim.AdamW"):
        accel_ckpt.save(tmp_path / "c", {"optimizer": {"exp_avg": TwoTensor(torch.ones(2), torch.ones(2))}})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(CheckpointError, match="s/n is a nested tensor"):
        accel_ckpt.save(tmp_path / "c", {"s": {"n": nested}})


def test_the_name_that_safetensors_keeps_is_refused_before_anything_is_committed(tmp_path):
    with pytest.raises(CheckpointError, match="__metadata__"):
        accel_ckpt.save(tmp_path / "c", {"__metadata__": torch.ones(2)})
    with pytest.raises(CheckpointError, match="__metadata__"):
        accel_ckpt.export_model({"__metadata__": torch.ones(2)}, tmp_path / "e")
    assert not (tmp_path / "c").exists()


def test_an_export_does_not_drop_one_of_two_names_that_become_the_same(tmp_path):
    accel_ckpt.save(tmp_path / "c", {"model": {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=r"a\.b and a/b of 'model' would both be called 'a\.b'"):
        accel_ckpt.export_checkpoint(tmp_path / "c", tmp_path / "e")
