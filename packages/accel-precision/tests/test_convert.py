from collections import OrderedDict, namedtuple
from types import MappingProxyType

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_precision import converter

Point = namedtuple("Point", ["x", "y"])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
LEAVES = st.one_of(
    st.sampled_from(DTYPES).map(lambda dtype: torch.ones(2).to(dtype)), st.integers(), st.text(), st.none()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=8,
)


def leaves(tree):
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    return [tree]


def shape(tree):
    if isinstance(tree, (list, tuple)):
        return type(tree), [shape(item) for item in tree]
    if isinstance(tree, dict):
        return type(tree), {key: shape(item) for key, item in tree.items()}
    return None


@settings(deadline=None)
@given(TREES)
def test_structure_is_kept_and_only_narrow_floats_change(tree):
    out = converter(torch.float32)(tree)
    assert shape(out) == shape(tree)
    for old, new in zip(leaves(tree), leaves(out), strict=True):
        if isinstance(old, torch.Tensor) and old.dtype in (torch.float16, torch.bfloat16):
            assert new.dtype is torch.float32
        else:
            assert new is old


@settings(deadline=None)
@given(TREES)
def test_converting_twice_changes_nothing_more(tree):
    once = converter(torch.float32)(tree)
    assert converter(torch.float32)(once) is once


def test_a_half_output_narrows():
    assert converter(torch.bfloat16)(torch.ones(2)).dtype is torch.bfloat16


def test_read_only_mappings_are_left_if_they_hold_nothing_to_convert():
    data = MappingProxyType({"a": torch.ones(1)})
    assert converter(torch.float32)(data) is data
