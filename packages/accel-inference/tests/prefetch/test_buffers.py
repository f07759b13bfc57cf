"""Buffers are used again only when nothing refers to them."""

import mmap

import torch

from accel_inference.prefetch.buffers import Buffer, BufferPool


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
