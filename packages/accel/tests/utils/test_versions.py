"""Versions sort as PEP 440 says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.utils.versions import Version, compare_versions, installed_version, is_torch_version

ORDERED = [
    "0.9",
    "1.0.dev1",
    "1.0a1.dev2",
    "1.0a1",
    "1.0b2",
    "1.0b2.post3",
    "1.0rc1",
    "1.0",
    "1.0+cpu",
    "1.0+cpu.1",
    "1.0+cu12.1",
    "1.0+1",
    "1.0.post1.dev3",
    "1.0.post1",
    "1.1",
    "1.10",
    "2.1.0.a0+32f93b1",
    "2.1.0",
    "1!0.1",
]


@given(st.sampled_from(range(len(ORDERED))), st.sampled_from(range(len(ORDERED))))
def test_order(first, second):
    a, b = Version(ORDERED[first]), Version(ORDERED[second])
    assert (a < b, a == b, a > b) == (first < second, first == second, first > second)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1.0", "1"), ("1.0.0", "v1.0"), ("1.0-1", "1.0.post1"), ("1.0alpha1", "1.0a1"), ("1.0c1", "1.0rc1")],
)
def test_spellings_of_one_version_are_equal(one, other):
    assert Version(one) == Version(other)
    assert hash(Version(one)) == hash(Version(other))


@pytest.mark.parametrize("text", ["", "one", "1..2", "1.0+"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="Invalid version"):
        Version(text)


@pytest.mark.parametrize(
    ("operation", "version", "expected"),
    [(">=", "1.0", True), ("<", "1.0", False), ("==", "0.0.1", False), ("!=", "0.0.1", True)],
)
def test_torch_is_compared(operation, version, expected):
    assert is_torch_version(operation, version) is expected
    assert compare_versions("torch", operation, version) is expected


def test_a_version_object_of_any_kind_is_compared():
    assert compare_versions(torch.torch_version.TorchVersion("2.1"), ">", "2.0")


def test_unknown_operations_are_refused():
    with pytest.raises(ValueError, match="`operation` must be one of"):
        compare_versions("torch", "=>", "1.0")


def test_what_is_not_installed_has_no_version():
    assert installed_version("no-such-distribution-here") is None
    assert installed_version("torch") is not None
