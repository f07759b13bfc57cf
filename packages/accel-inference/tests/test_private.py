"""Private names of torch: what they answer, and what happens without them."""

import pytest
import torch

from accel_inference.private import names_device


def test_arguments_that_name_a_device() -> None:
    assert names_device("cpu")
    assert names_device(torch.ones(1))
    assert names_device(device=torch.device("cpu"), dtype=torch.float64)
    assert not names_device(torch.float64)


def test_without_torchs_parser_a_move_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._nn, "_parse_to")
    assert names_device(torch.float64)
