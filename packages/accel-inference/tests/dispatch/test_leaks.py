"""Offloaded models leave nothing behind: neither with each forward nor when they end."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.offload import cpu_offload, disk_offload
from accel_inference.hooks.hook import remove_hook_from_submodules

WIDTH, BLOCKS = 512, 8
SIZE = WIDTH * WIDTH * 4
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's counts of a process")


def resident():
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def to_cpu(_folder):
    return cpu_offload(build())


def to_disk(folder):
    return disk_offload(build(), folder, resident_bytes=3 * SIZE)


def by_map(folder):
    places = ("cpu", "disk")
    device_map = {str(index): places[index % 2] for index in range(BLOCKS)}
    return dispatch_model(build(), device_map, "cpu", offload_dir=folder, force_hooks=True, resident_bytes=2 * SIZE)


def counted(run, times):
    """Memory, objects and descriptors of the process after so many runs."""
    for _ in range(times):
        run()
    gc.collect()
    return resident(), len(gc.get_objects()), descriptors()


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [to_cpu, to_disk, by_map])
@torch.no_grad()
def test_a_hundred_forwards_leave_no_memory_objects_or_descriptors(offloaded, tmp_path):
    model, x = offloaded(tmp_path), torch.ones(1, WIDTH)
    counts = [counted(lambda: model(x), times) for times in (10, 100, 100, 100)]
    # What a forward leaves is left in each hundred; what the allocator or another thread takes, in one of them.
    memory, objects, opened = (min(map(int.__sub__, kind[1:], kind)) for kind in zip(*counts, strict=True))
    assert memory < 2 * SIZE
    assert objects < 100
    assert opened <= 1  # the reader thread may read now


@pytest.mark.parametrize("removed", [False, True])
@torch.no_grad()
def test_a_model_that_ends_takes_its_weights_and_its_thread_with_it(removed, tmp_path):
    model, x = to_disk(tmp_path), torch.ones(1, WIDTH)
    model(x)
    prefetcher = model[0]._hf_hook.weights_map.origin()[0].prefetcher(torch.device("cpu"))
    ends = [weakref.ref(one) for one in (model, prefetcher, model[0]._hf_hook)]
    reader = prefetcher._reader
    del prefetcher
    if removed:
        remove_hook_from_submodules(model)
    else:
        del model
    if reader is not None:
        reader.join(5)
        assert reader not in threading.enumerate()
    gc.collect()
    assert [one() is None for one in ends] == [not removed, True, True]


ENDS_WHILE_READING = """
import sys
import torch
from torch import nn
from accel_inference import disk_offload
from accel_inference.prefetch.segments import Segment

read = Segment.read

def slowly(segment, stream):
    read(segment, stream)
    for _ in range(200):
        torch.ones(400, 400) @ torch.ones(400, 400)

Segment.read = slowly
model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
disk_offload(model, sys.argv[1], resident_bytes=40_000)
with torch.no_grad():
    model(torch.ones(1, 64))
"""


def test_a_program_that_ends_while_weights_are_read_ends_well(tmp_path):
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_READING, tmp_path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
