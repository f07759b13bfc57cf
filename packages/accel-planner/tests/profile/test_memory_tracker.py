"""Memory tracker: storages are counted once, and as long as they live."""

import pytest
import torch

from accel_planner.profile.memory_tracker import StorageWatch


def test_storages_are_counted_once_and_until_they_go() -> None:
    with StorageWatch() as watch:
        a = torch.zeros(100)
        b = a.view(10, 10).t()
        c = a + 1
        held = watch.live
        del a, b
    assert (held, watch.live, watch.peak) == (800, 400, 800)
    del c


@pytest.mark.parametrize(("layout", "copied"), [(torch.contiguous_format, 1), (torch.channels_last, 0)])
def test_a_convolution_copies_what_it_reads_into_its_own_layout(layout: torch.memory_format, copied: int) -> None:
    image, weight = torch.zeros(2, 4, 8, 8).to(memory_format=layout), torch.zeros(4, 4, 3, 3)
    with StorageWatch() as watch:
        result = torch.conv2d(image, weight, padding=1)
    assert (watch.live, watch.peak) == (result.nbytes, result.nbytes + copied * image.nbytes)
