"""Pinned memory: for which devices, what a refusal leads to, and copies that end with the stream of their tensor."""

import logging

import pytest
import torch

from accel_state.device.pinned import HostCopy, pin_in_place, pinned_bytes, uses_pinned_memory

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


class Runtime:
    """The two functions of CUDA's runtime, which refuse with ``status``."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("end", ["call", "deletion"])
def test_memory_is_unpinned_once_and_before_it_is_freed(runtime: Runtime, end: str) -> None:
    tensor = torch.empty(1000, dtype=torch.uint8)
    address = tensor.data_ptr()
    unpin = pin_in_place(tensor)
    assert unpin is not None
    assert runtime.calls == [("register", address, 1000, 0)]
    if end == "call":
        unpin()
    del tensor
    assert runtime.calls[1:] == [("unregister", address)]


def test_a_refusal_to_pin_in_place_leaves_no_error_for_the_next_kernel(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.status = 2
    launched: list[object] = []

    def zeros(size: int, *, device: object) -> torch.Tensor:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with caplog.at_level(logging.WARNING):
        assert pin_in_place(torch.empty(2 << 20, dtype=torch.uint8)) is None
    assert "the driver did not pin 2 MiB (CUDA error 2); copies take longer" in caplog.text
    assert launched == ["cuda"]
    assert [call[0] for call in runtime.calls] == ["register"]


def test_without_cuda_no_memory_is_pinned_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pin_in_place(torch.empty(8)) is None


@pytest.mark.gpu
def test_an_accelerator_copies_to_memory_that_is_pinned_in_place() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    tensor = torch.empty(5 << 20, dtype=torch.uint8)
    unpin = pin_in_place(tensor)
    assert unpin is not None
    assert tensor.is_pinned()
    value = torch.arange(5 << 20, device="cuda").to(torch.uint8)
    tensor.copy_(value, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensor, value.cpu())
    unpin()
    assert not tensor.is_pinned()
    assert int(torch.zeros(1, device="cuda")) == 0  # no error is left


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
