"""Device maps: coverage, unknown entries, the shortest form."""

import pytest

from accel_inference.module_tensors.ties import check_tied_parameters_on_same_device
from accel_inference.placement.device_map import check_device_map, clean_device_map


@pytest.mark.parametrize("good", [{"": 0}, {"linear1": 0, "linear2": 1, "batchnorm": 1}])
def test_a_map_that_covers_all_is_right(three_layers, good):
    assert check_device_map(three_layers(), good) is None


def test_a_module_without_device_is_named(three_layers):
    with pytest.raises(ValueError, match=r"batchnorm\.weight, batchnorm\.bias, batchnorm\.running_mean"):
        check_device_map(three_layers(), {"linear1": 0, "linear2": 1})


def test_an_entry_that_matches_nothing_is_warned_of(three_layers):
    with pytest.warns(UserWarning, match=r"device_map keys do not match any submodules.*linear9"):
        check_device_map(three_layers(), {"": 0, "linear9": 1})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": 0, "b": 0}, {"": 0}),
        ({"a.b": 0, "a.c": 0, "b": 1}, {"a": 0, "b": 1}),
        ({"a.1": 0, "a.10": 0, "ab": 1}, {"a": 0, "ab": 1}),
        ({"a.b.c": 0, "a.b.d": 0, "a.e": 1, "f": 1}, {"a.b": 0, "a.e": 1, "f": 1}),
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}),
    ],
)
def test_siblings_on_one_device_are_one_entry(given, expected):
    assert clean_device_map(given) == expected


def test_ties_over_devices_are_warned_of(caplog):
    check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": 0})
    assert not caplog.text
    check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": 1})
    assert "a.weight" in caplog.text
