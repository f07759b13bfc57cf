"""Blocks of messages: used again once nobody looks into them, and not before."""

import pytest
import torch

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.serialization import Arriving, pack

LARGE = 1 << 20


def tensor_in(blocks: Blocks, size: int = LARGE) -> torch.Tensor:
    return torch.frombuffer(blocks.take(size), dtype=torch.uint8)


def test_a_block_comes_back_when_its_last_view_is_gone():
    blocks = Blocks()
    first = tensor_in(blocks)
    place, view = first.data_ptr(), first[10:20]
    del first
    other = tensor_in(blocks)
    assert other.data_ptr() != place
    del view
    assert tensor_in(blocks).data_ptr() == place


def test_blocks_outlive_who_gave_them():
    blocks = Blocks()
    kept = tensor_in(blocks).fill_(7)
    del blocks
    assert kept.eq(7).all()


@pytest.mark.parametrize("sizes", [(LARGE, 3 * LARGE), (4 * LARGE, LARGE)], ids=["larger", "much smaller"])
def test_a_block_that_does_not_fit_is_left_alone(sizes):
    blocks = Blocks()
    first, second = sizes
    place = tensor_in(blocks, first).data_ptr()
    assert tensor_in(blocks, second).data_ptr() != place


def test_few_blocks_are_kept():
    blocks = Blocks()
    held = [tensor_in(blocks) for _ in range(80)]
    assert len({tensor.data_ptr() for tensor in held}) == 80
    held.clear()
    assert sum(map(len, blocks._free)) == 64 << 20


@pytest.mark.parametrize("rows", [3, 300_000], ids=["small", "large"])
def test_a_message_survives_the_next_one_in_the_same_memory(rows):
    sending, receiving = Blocks(), Blocks()
    kept = []
    for number in range(6):
        message = pack({"x": torch.full((rows,), number), "n": number}, sending)
        body = receiving.take(message.body.nbytes)
        torch.frombuffer(body, dtype=torch.uint8).copy_(message.body)
        arriving = Arriving(body, receiving)
        for room, sent in zip(arriving.room, message.large, strict=True):
            room.copy_(sent)
        kept.append(arriving.content())
        del message, body, arriving
    assert [batch["n"] for batch in kept] == list(range(6))
    assert [batch["x"].unique().tolist() for batch in kept] == [[number] for number in range(6)]
