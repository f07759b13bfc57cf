"""Ring of pinned blocks: the bytes, the order of copies and waits, and saves and loads through it.

Without an accelerator the blocks are ordinary memory and the copies are done at once; what the ring waits for, and
when, is recorded instead.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accel_ckpt
from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io import pinned_ring
from accel_ckpt.io.pinned_ring import PinnedRing, host_pieces
from accel_ckpt.loading import tensor_reader
from accel_ckpt.saving import host_snapshot
from accel_ckpt.saving.host_snapshot import copy_into

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64)


def tensors_of(sizes: list[int]) -> list[torch.Tensor]:
    values = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 2, (size, 3), generator=values) for size in sizes]
    return [tensor.to(DTYPES[number % len(DTYPES)]).t() for number, tensor in enumerate(made)]


def bytes_of(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(byte_view(tensor.contiguous())) for tensor in tensors)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), block=st.integers(1, 64), count=st.integers(1, 4))
def test_all_bytes_arrive_in_order(sizes: list[int], block: int, count: int) -> None:
    tensors, ring = tensors_of(sizes), PinnedRing(block=block, count=count)
    for _ in range(2):
        assert b"".join(bytes(view) for view in ring.to_host(tensors)) == bytes_of(tensors)
    for tensor in tensors:
        assert torch.equal(ring.to_device(tensor.contiguous(), torch.device("cpu")), tensor)


def test_each_block_is_waited_for_before_it_is_read_or_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    made: list[int] = []

    def end_of_stream(device: torch.device) -> Callable[[], None]:
        number = len(made)
        made.append(number)
        return lambda: done.append(number)

    monkeypatch.setattr(pinned_ring, "end_of_stream", end_of_stream)
    ring = PinnedRing(block=4, count=3)
    for number, _ in enumerate(ring.to_host([torch.arange(7, dtype=torch.float32)])):
        assert done == list(range(number + 1))
        assert len(made) == min(number + 3, 7), "the copies of the next blocks run meanwhile"
    done.clear()
    made.clear()
    ring.to_device(torch.arange(7, dtype=torch.float32), torch.device("cpu"))
    assert made == list(range(7))
    assert done == list(range(4)), "the last three blocks may still be on their way"


def test_a_copy_is_waited_for_on_the_stream_of_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            seen.append(device)

        def record(self, stream: str) -> None:
            seen.append(stream)

        def synchronize(self) -> None:
            seen.append("waited")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    second = torch.device("cuda:1")  # while another device is the current one
    pinned_ring.end_of_stream(second)()
    assert seen == [second, "stream of cuda:1", "waited"]


def test_saves_snapshots_and_loads_pass_through_the_ring_but_for_snapshots_in_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    to_host, to_device = PinnedRing.to_host, PinnedRing.to_device

    def counted_to_host(self: PinnedRing, tensors: list[torch.Tensor]) -> object:
        passed.append(len(tensors))
        return to_host(self, tensors)

    def counted_to_device(self: PinnedRing, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        passed.append(1)
        return to_device(self, source, device)

    monkeypatch.setattr(PinnedRing, "to_host", counted_to_host)
    monkeypatch.setattr(PinnedRing, "to_device", counted_to_device)
    for module in (pinned_ring, host_snapshot, tensor_reader):
        monkeypatch.setattr(module, "uses_pinned_memory", lambda device: device.type == "cpu")
    state = {f"t{number}": tensor for number, tensor in enumerate(tensors_of([5, 1, 9, 2, 3]))}
    checkpoint = accel_ckpt.save(tmp_path / "one", {"model": state})
    assert passed == [5]
    likes = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read = checkpoint.read("model", likes)
    assert passed == [5, 1, 1, 1, 1, 1]
    assert isinstance(read, dict)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    strided = [tensor for tensor in state.values() if not tensor.is_contiguous()]
    buffer = torch.empty(sum(tensor.nbytes for tensor in state.values()), dtype=torch.uint8)
    copy_into(buffer, list(state.values()))
    assert passed[6:] == [len(strided)]
    assert bytes(byte_view(buffer)) == bytes_of(list(state.values()))
    buffer.zero_()
    waits: list[torch.device] = []
    monkeypatch.setattr(host_snapshot, "end_of_stream", lambda device: lambda: waits.append(device))
    copy_into(buffer, list(state.values()), pinned=True)
    assert (passed[7:], waits) == ([], [torch.device("cpu")])
    assert bytes(byte_view(buffer)) == bytes_of(list(state.values()))


def test_pieces_of_contiguous_host_tensors_are_not_copied() -> None:
    tensor = torch.arange(6.0)
    (piece,) = host_pieces([tensor])
    piece[:4] = bytes(byte_view(torch.tensor([42.0])))
    assert tensor[0] == 42.0
