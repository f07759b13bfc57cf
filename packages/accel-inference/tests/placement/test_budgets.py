"""Budgets: what is given, what is free, and even shares."""

import logging
import sys

import numpy as np
import pytest
from torch import nn

from accel_inference.placement.budgets import get_balanced_memory, get_max_memory
from accel_state.device.device import Device


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({0: 200, 1: 200}, {0: 200, 1: 200}),
        ({0: 200, 2: 200}, {0: 200, 2: 200}),
        ({0: 300, 1: 300}, {0: 215, 1: 300}),
        ({0: 300, 1: 500}, {0: 215, 1: 500}),
        ({0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, {0: 0, 1: 215, 2: 300}),
        ({0: 0, "cpu": 100}, {0: 0, "cpu": 100}),
    ],
)
def test_each_device_but_the_last_gets_an_even_share(three_layers, given, expected):
    assert get_balanced_memory(three_layers(), given) == expected


def test_low_zero_leaves_the_first_device_as_empty_as_the_others_permit():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    assert get_balanced_memory(model, {0: 2000, 1: 2000, 2: 2000}, low_zero=True)[0] == 0
    assert get_balanced_memory(model, {0: 2000, 1: 300, 2: 300}, low_zero=True)[0] == 1024 - 600


def test_sizes_may_be_texts_and_keys_come_in_order():
    found = get_max_memory({"disk": "1GB", "cpu": "1KiB", 1: "2MB", 0: 5})
    assert list(found.items()) == [(0, 5), (1, 2_000_000), ("cpu", 1024), ("disk", 10**9)]


@pytest.mark.parametrize("size", [1.5e9, np.int64(1_500_000_000)], ids=["float", "NumPy"])
def test_sizes_may_be_numbers_of_any_type(size):
    found = get_max_memory({"cpu": size, "disk": float("inf")})
    assert found == {"cpu": 1_500_000_000, "disk": sys.maxsize}
    assert type(found["cpu"]) is int


def test_the_host_has_what_is_free():
    total = Device("cpu").memory().total
    assert 0 < get_max_memory()["cpu"] <= total


def test_an_unknown_device_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gpu'.*integers.*'cpu'"):
        get_max_memory({"gpu": 1})


def test_a_device_that_is_not_here_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        get_max_memory({500: 1})
    assert "[500]" in caplog.text
