"""Buffers are used again only when nothing refers to them."""

import mmap

import torch

from accel_inference.prefetch import buffers, segments
from accel_inference.prefetch.buffers import Buffer, BufferPool, PinnedBuffer, new_buffer
from accel_inference.prefetch.segments import Segment
from accel_inference.weights.offload_folder import indexed_weight, offload_weight
from accel_inference.weights.sources import HostWeight


def test_a_view_shows_the_bytes():
    buffer = Buffer(mmap.PAGESIZE)
    with buffer.bytes_at(64, 8) as target:
        target[:] = bytes(range(8))
    assert buffer.view(64, (2, 2), torch.int16).tolist() == [[256, 770], [1284, 1798]]
    assert buffer.view(0, (0, 3), torch.float32).shape == (0, 3)


def test_a_buffer_with_a_tensor_is_not_used_again():
    pool, buffer = BufferPool(), Buffer(mmap.PAGESIZE)
    kept = buffer.view(0, (4,), torch.float32)[1:]
    pool.give(buffer)
    assert pool.take(100) is None
    assert kept.tolist() == [0, 0, 0]


def test_a_buffer_that_autograd_saved_is_not_used_again():
    buffer = Buffer(mmap.PAGESIZE)
    x = torch.ones(4, requires_grad=True)
    y = (x * buffer.view(0, (4,), torch.float32)).sum()
    assert not buffer.is_unused
    y.backward()
    del y
    assert buffer.is_unused


def test_the_pool_serves_the_same_size():
    pool, buffer = BufferPool(), Buffer(mmap.PAGESIZE)
    pool.give(buffer)
    assert pool.nbytes == mmap.PAGESIZE
    assert pool.take(mmap.PAGESIZE + 1) is None
    assert pool.take(1) is buffer
    pool.give(buffer)
    pool.drop()
    assert (pool.nbytes, pool.take(1)) == (0, None)


def test_buffers_for_an_accelerator_are_pinned(monkeypatch):
    assert type(new_buffer(64, torch.device("cpu"))) is Buffer
    monkeypatch.setattr(buffers, "uses_pinned_memory", lambda device: device.type == "cuda")
    assert type(new_buffer(64, torch.device("cuda"))) is PinnedBuffer


def test_weights_for_an_accelerator_pass_through_its_buffer(tmp_path, monkeypatch):
    in_memory, in_file = torch.arange(6.0).view(2, 3), torch.arange(10, dtype=torch.int16)
    transposed = torch.arange(6.0).view(2, 3).T
    index = offload_weight(in_file, "w", tmp_path)
    source = indexed_weight("w", index["w"], tmp_path, {})
    segment = Segment({"memory": HostWeight(in_memory), "file": source, "transposed": HostWeight(transposed)})
    segment.buffer = PinnedBuffer(segment.buffer_bytes)
    begin = segment.buffer._memory.data_ptr()
    copied = {}

    def copy(tensors, stream):
        copied.update(tensors)
        return {key: tensor.clone() for key, tensor in tensors.items()}

    monkeypatch.setattr(segments, "copied", copy)
    segment.read(object())
    assert copied.pop("transposed") is transposed
    assert all(begin <= tensor.data_ptr() < begin + segment.buffer_bytes for tensor in copied.values())
    assert torch.equal(segment.tensors["memory"], in_memory)
    assert torch.equal(segment.tensors["file"], in_file)
