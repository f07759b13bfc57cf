"""Errors of ranks that save together, when a rank cannot reach the others."""

import pytest
import torch.distributed as dist

from accel_ckpt.rank_group import RankGroup
from accel_state.errors import CheckpointError


@pytest.mark.ranks(2)
@pytest.mark.parametrize("collective", ["run_on_all", "gather_to_first"])
def test_an_error_in_a_group_that_was_destroyed_is_named_with_the_group(collective: str) -> None:
    group = dist.new_group()
    peers = RankGroup(group)
    dist.destroy_process_group(group)

    def fail() -> None:
        raise FileNotFoundError("no such folder")

    then = () if collective == "run_on_all" else (print,)
    with pytest.raises(CheckpointError, match=r"^saving: FileNotFoundError: no such folder; .* group was destroyed: "):
        getattr(peers, collective)("saving", fail, *then)
    with pytest.raises(CheckpointError, match=r"^saving: a rank is gone or .* group was destroyed: "):
        getattr(peers, collective)("saving", int, *then)
