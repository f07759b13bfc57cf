"""Weights of a saved model are read one by one."""

import pytest
import torch

from accel_ckpt import save
from accel_ckpt.tools.stored_weights import stored_weights
from accel_state.errors import CheckpointError


def test_each_weight_is_read_by_its_name(tmp_path):
    state = {"a.weight": torch.randn(3, 2), "b": torch.arange(4)}
    save(tmp_path / "saved", {"model": state})
    found = stored_weights(tmp_path / "saved")
    assert {name: (weight.shape, weight.dtype) for name, weight in found.items()} == {
        "a.weight": ((3, 2), torch.float32),
        "b": ((4,), torch.int64),
    }
    assert all(torch.equal(weight.read(), state[name]) for name, weight in found.items())


def test_a_state_that_is_not_there_names_the_others(tmp_path):
    save(tmp_path / "saved", {"model": {"a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"holds no 'teacher'; it holds 'model'"):
        stored_weights(tmp_path / "saved", state="teacher")
