"""Gradients of a call belong to its own loss, and to the window in which its backward runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_megatron.training.window import Scheduled, WindowGradients
from accel_state.errors import BackendError


class Calls:
    """Calls of a model with one buffer, in which a call of ``call(number)`` leaves this number."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(2)
        chunk = SimpleNamespace(
            buffers=[SimpleNamespace(grad_data=self.buffer)],
            expert_parallel_buffers=[],
            zero_grad_buffer=self.buffer.zero_,
            zero_grad=lambda: None,
        )
        self.window = WindowGradients([chunk])

    def call(self, number: float) -> Any:
        self.window.open()
        self.buffer.fill_(number)
        return Scheduled.apply(torch.zeros((), requires_grad=True), torch.tensor(number), self.window)


def test_a_later_call_does_not_lend_its_gradients_to_an_earlier_loss() -> None:
    calls = Calls()
    first, second = calls.call(1.0), calls.call(2.0)
    with pytest.raises(BackendError, match="discarded by a later call"):
        first.backward()
    (3 * second).backward()
    assert calls.buffer.tolist() == [6.0, 6.0]


def test_gradients_may_be_dropped_between_a_call_and_its_backward() -> None:
    calls = Calls()
    for number in (1.0, 2.0):
        loss = calls.call(number)
        calls.window.end()  # zero_grad
        loss.backward()
        assert calls.buffer.tolist() == [number, number]
        calls.window.reduced = True  # a step
    loss = calls.call(3.0)
    with pytest.raises(BackendError, match="without zero_grad"):
        loss.backward()
    calls.window.end()
    assert not calls.window.filled
