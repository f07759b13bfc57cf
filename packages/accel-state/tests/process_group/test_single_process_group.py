from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from accel_state.process_group.single_process_group import SingleProcessGroup

DEVICE: Any = SimpleNamespace(collective_backend="gloo")


def test_only_the_opener_closes_the_group_of_a_process() -> None:
    opener, other = SingleProcessGroup(DEVICE), SingleProcessGroup(DEVICE)
    opener.open()
    try:
        other.open()
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        other.close()
        assert dist.is_initialized()
    finally:
        opener.close()
    assert not dist.is_initialized()
    opener.open()
    opener.close()
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_the_group_of_a_launched_run_is_left_alone() -> None:
    group = SingleProcessGroup(DEVICE)
    group.open()
    group.close()
    assert dist.get_world_size() == 2
