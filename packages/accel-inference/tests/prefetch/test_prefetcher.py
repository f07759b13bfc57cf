"""The prefetcher: right weights, in advance, within the budget, from one thread at a time."""

import os
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from accel_inference.prefetch.prefetcher import Prefetcher
from accel_inference.weights.offload_folder import indexed_weight, offload_state_dict
from accel_inference.weights.safetensors_header import read_header
from accel_inference.weights.sources import HostWeight
from accel_state.errors import CheckpointCorruptError

CPU = torch.device("cpu")
ELEMENTS = 64 * 1024
BLOCK = ELEMENTS * 4


@pytest.fixture(params=["checkpoint", "offload folder"])
def stored(request, tmp_path):
    """A file of all weights, or an offload folder, whose files are mapped."""
    tensors = {f"w{index}": torch.full((ELEMENTS,), float(index)) for index in range(8)}
    if request.param == "checkpoint":
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"
    offload_state_dict(tmp_path / "weights", tensors)
    return tmp_path / "weights"


def weights_of(stored):
    if stored.is_file():
        return read_header(stored)[0]
    entry = {"dtype": "float32", "shape": [ELEMENTS]}
    return {f"w{index}": indexed_weight(f"w{index}", entry, stored, {}) for index in range(8)}


def of_file(stored, *, budget=None, ties=()):
    weights = weights_of(stored)
    prefetcher = Prefetcher(CPU, budget=budget)
    blocks = [prefetcher.add({"weight": weights[name]}) for name in sorted(weights)]
    blocks += [prefetcher.add({"tied": weights[name]}) for name in ties]
    return prefetcher, blocks


def forward(prefetcher, blocks, compute=lambda: None):
    seen = []
    for block in blocks:
        (tensor,) = prefetcher.acquire(block).values()
        compute()
        seen.append((float(tensor[0]), float(tensor[-1])))
        del tensor
        prefetcher.release(block)
    return seen


@pytest.mark.parametrize("budget", [1, BLOCK, 2 * BLOCK, 3 * BLOCK, 100 * BLOCK])
def test_every_block_has_its_weights_whatever_the_budget(stored, budget):
    prefetcher, blocks = of_file(stored, budget=budget)
    for order in (blocks, blocks, blocks[::-1], blocks[::2], blocks):
        assert forward(prefetcher, order) == [(float(block), float(block)) for block in order]
    assert prefetcher.counts.peak_bytes <= budget + 2 * BLOCK
    prefetcher.close()
    assert prefetcher._resident() == 0


def test_most_blocks_are_read_in_advance(stored):
    prefetcher, blocks = of_file(stored, budget=3 * BLOCK)
    for _ in range(4):
        forward(prefetcher, blocks, compute=lambda: time.sleep(0.01))
    counts = prefetcher.counts
    assert counts.predicted >= counts.acquired - 1
    assert counts.bytes_in_advance > counts.bytes_read / 2


def test_what_fits_is_read_once(stored):
    prefetcher, blocks = of_file(stored)
    for _ in range(3):
        forward(prefetcher, blocks)
    assert prefetcher.counts.bytes_read == 8 * BLOCK


def test_of_a_model_that_does_not_fit_a_part_stays(stored):
    prefetcher, blocks = of_file(stored, budget=5 * BLOCK)
    forward(prefetcher, blocks)
    before = prefetcher.counts.bytes_read
    for _ in range(4):
        forward(prefetcher, blocks, compute=lambda: time.sleep(0.005))
    assert prefetcher.counts.bytes_read - before <= 4 * 6 * BLOCK


def test_a_tied_weight_is_one_tensor(stored):
    prefetcher, blocks = of_file(stored, ties=["w0"])
    first = prefetcher.acquire(blocks[0])["weight"]
    second = prefetcher.acquire(blocks[-1])["tied"]
    assert first.data_ptr() == second.data_ptr()
    prefetcher.release(blocks[0])
    prefetcher.release(blocks[-1])
    assert prefetcher.counts.bytes_read >= BLOCK


def test_a_weight_that_is_kept_keeps_its_values(stored):
    prefetcher, blocks = of_file(stored, budget=1)
    kept = prefetcher.acquire(blocks[3])["weight"]
    prefetcher.release(blocks[3])
    for _ in range(3):
        forward(prefetcher, blocks)
    assert kept.unique().tolist() == [3.0]


def test_weights_in_host_memory_are_used_where_they_are():
    tensor = torch.ones(4)
    prefetcher = Prefetcher(CPU)
    block = prefetcher.add({"weight": HostWeight(tensor)})
    assert prefetcher.acquire(block)["weight"] is tensor
    prefetcher.release(block)
    assert prefetcher.counts.bytes_read == 0


def test_a_second_thread_is_refused_while_the_first_computes(stored):
    prefetcher, blocks = of_file(stored)
    prefetcher.acquire(blocks[0])
    refused = []

    def use():
        try:
            prefetcher.acquire(blocks[1])
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "another thread computes with this model" in refused[0]
    prefetcher.release(blocks[0])
    assert forward(prefetcher, blocks[:2]) == [(0.0, 0.0), (1.0, 1.0)]


def do_harm(harm, stored):
    """Changes the file of the weights of block 2, whose name is returned."""
    file = stored if stored.is_file() else stored / "w2.dat"
    if harm == "replaced":
        new = file.with_name("new")
        new.write_bytes(bytes(file.stat().st_size))
        new.replace(file)
    elif harm == "cut":
        os.truncate(file, BLOCK // 2)
    elif harm == "written":
        with file.open("r+b") as opened:
            opened.write(b"x")
        os.utime(file, ns=(1, 1))
    else:
        file.unlink()
    return file.name


@pytest.mark.parametrize("harm", ["replaced", "cut", "written", "removed"])
def test_a_file_that_changed_is_refused_and_never_half_read(stored, harm):
    prefetcher, blocks = of_file(stored, budget=1)
    forward(prefetcher, blocks)
    name = do_harm(harm, stored)
    expected = FileNotFoundError if harm == "removed" else CheckpointCorruptError
    with pytest.raises(expected, match=name):
        forward(prefetcher, blocks)
    assert prefetcher._held == 0


@pytest.mark.parametrize("harm", ["replaced", "cut", "written", "removed"])
def test_resident_weights_keep_their_values_or_are_refused_if_their_file_changes(stored, harm):
    prefetcher, blocks = of_file(stored)
    expected = forward(prefetcher, blocks)
    name = do_harm(harm, stored)
    if stored.is_dir() and harm in ("cut", "written"):
        with pytest.raises(CheckpointCorruptError, match=name):
            forward(prefetcher, blocks)
        assert prefetcher._held == 0
    else:
        assert forward(prefetcher, blocks) == expected


def test_the_reader_thread_ends_with_its_model(stored):
    prefetcher, blocks = of_file(stored)
    forward(prefetcher, blocks)
    reader = prefetcher._reader
    del prefetcher
    if reader is not None:
        reader.join(2)
        assert not reader.is_alive()


def test_weights_read_in_inference_mode_serve_autograd(stored):
    prefetcher, blocks = of_file(stored)
    with torch.inference_mode():
        forward(prefetcher, blocks)
    x = torch.ones(ELEMENTS, requires_grad=True)
    (x * prefetcher.acquire(blocks[2])["weight"]).sum().backward()
    prefetcher.release(blocks[2])
    assert float(x.grad[0]) == 2.0
