"""Pinned memory: for which devices, what a refusal leads to, and copies that end with the stream of their tensor."""

import logging

import pytest
import torch

from accel_state.device.pinned import HostCopy, pinned_bytes, uses_pinned_memory

CUDA = torch.device("cuda")


@pytest.fixture
def with_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xpu"])
@pytest.mark.usefixtures("with_accelerator")
def test_only_tensors_of_the_processs_accelerator_pass_through_pinned_memory(kind: str) -> None:
    assert uses_pinned_memory(CUDA)
    assert not uses_pinned_memory(torch.device(kind))


def test_without_an_accelerator_none_do() -> None:
    assert uses_pinned_memory(CUDA) == torch.cuda.is_available()


@pytest.mark.usefixtures("with_accelerator")
def test_memory_that_cannot_be_pinned_is_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refusing(*size: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no memory to pin")
        return empty(*size, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refusing)
    with caplog.at_level(logging.WARNING):
        assert pinned_bytes(3 << 20).numel() == 3 << 20
    assert "3 MiB of pinned memory were refused (no memory to pin)" in caplog.text


@pytest.mark.parametrize("value", [torch.arange(6.0).view(2, 3).T, torch.tensor(True), torch.empty(0, 2)])
def test_a_copy_has_the_values_of_its_moment(value: torch.Tensor) -> None:
    expected = value.clone()
    copy = HostCopy(value)
    value.zero_()
    assert torch.equal(copy.read(), expected)


def test_a_copy_from_an_accelerator_waits_for_its_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor stands for one of an accelerator; the values of the copy are those of its pinned memory."""
    waited: list[str] = []

    class Event:
        def synchronize(self) -> None:
            waited.append("event")

    class Stream:
        def record_event(self) -> Event:
            waited.append("recorded")
            return Event()

    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other, non_blocking: waited.append(f"copied {non_blocking}")
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    copy = HostCopy(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert waited == ["copied True", "recorded"]
    found = copy.read()
    assert waited == ["copied True", "recorded", "event"]
    assert (found.device.type, found.dtype, found.shape) == ("cpu", torch.bfloat16, (2, 3))
