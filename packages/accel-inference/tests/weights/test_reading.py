"""Weights are read in their order, several at a time, and not far ahead of their use."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from accel_inference.weights.reading import read_in_order, read_in_turn
from accel_inference.weights.safetensors_header import read_header
from accel_inference.weights.sources import FormatWeight, HostWeight
from accel_state.errors import CheckpointCorruptError

LARGE = 2**19


@pytest.fixture
def saved(tmp_path):
    """Weights large and small by name, and the file that has them."""
    weights = {f"{index}": torch.randn(LARGE if index % 2 else 8) for index in range(9)}
    save_file(weights, tmp_path / "model.safetensors")
    return weights, tmp_path / "model.safetensors"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_weights_come_in_the_order_of_their_sources(saved, threads):
    weights, file = saved
    found, _ = read_header(file)
    read = list(read_in_order((found[name] for name in weights), threads=threads))
    assert all(torch.equal(one, weights[name]) for one, name in zip(read, weights, strict=True))


def test_a_weight_of_another_format_is_read_by_the_caller(saved):
    weights, file = saved
    found, _ = read_header(file)
    readers = []

    def reader():
        readers.append(threading.get_ident())
        return torch.ones(LARGE)

    other = FormatWeight(reader, (LARGE,), torch.float32, torch.bfloat16)
    large, of_format, host = read_in_order([found["1"], other, HostWeight(weights["3"])], threads=2)
    assert torch.equal(large, weights["1"])
    assert of_format.dtype is torch.bfloat16
    assert readers == [threading.get_ident()]
    assert host is weights["3"]


def test_sources_are_taken_as_their_weights_are_used(saved):
    weights, file = saved
    found, _ = read_header(file)
    taken = []

    def sources():
        for name in ("1", "3", "5", "7", "1", "3", "5", "7"):
            taken.append(name)
            yield found[name]

    reading = read_in_order(sources(), threads=2)
    assert torch.equal(next(reading), weights["1"])
    assert len(taken) == 3


def test_weights_in_host_memory_are_not_collected():
    made = []

    def sources():
        for _ in range(5):
            made.append(HostWeight(torch.ones(2)))
            yield made[-1]

    reading = read_in_order(sources(), threads=2)
    next(reading)
    assert len(made) == 1


def test_a_file_that_was_cut_is_the_error_of_its_weight(saved):
    weights, file = saved
    found, _ = read_header(file)
    reading = read_in_order([found["0"], found["1"], found["3"]], threads=2)
    assert torch.equal(next(reading), weights["0"])
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointCorruptError, match=r"model.safetensors was replaced or written to"):
        list(read_in_order([found["0"], found["1"], found["3"]], threads=2))


def test_weights_in_turn_share_two_buffers(saved):
    weights, file = saved
    found, _ = read_header(file)
    places = []
    for name, one in zip(weights, read_in_turn(found[name] for name in weights), strict=True):
        assert torch.equal(one, weights[name])
        places.append(one.data_ptr())
    assert len(set(places)) == 2


def test_weights_in_turn_that_are_in_memory_stay_there():
    one = torch.ones(4)
    assert [read.data_ptr() for read in read_in_turn([HostWeight(one), HostWeight(one)])] == [one.data_ptr()] * 2
    assert list(read_in_turn([])) == []
