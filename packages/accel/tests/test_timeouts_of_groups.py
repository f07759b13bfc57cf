"""The timeout that explain() reports is that of every group of the run, device meshes and other libraries' included."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel import Accelerator, InitProcessGroupKwargs
from accel_state.process_group.group import default_group, read_timeout
from accel_state.session import Session

LIMIT = timedelta(seconds=77)


def timeouts() -> set[timedelta | None]:
    """Of all groups but the default one, which is the harness's."""
    known = list(dist.distributed_c10d._world.pg_map)
    return {read_timeout(group) for group in known if group is not default_group()}


def prepare(**options: object) -> Accelerator:
    process_group = InitProcessGroupKwargs(timeout=LIMIT)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[process_group], **options)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_every_group_of_a_strategy_has_it(rank: int, strategy: str) -> None:
    accelerator = prepare(strategy=strategy)
    assert accelerator.explain().timeout_seconds == LIMIT.total_seconds()
    assert timeouts() == {LIMIT}
    accelerator.end_training()


@pytest.mark.ranks(4)
def test_meshes_of_several_dimensions_have_it(rank: int) -> None:
    from accel.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="HYBRID_SHARD")
    accelerator = prepare(fsdp_plugin=plugin)
    assert timeouts() == {LIMIT}
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_groups_of_other_libraries_have_it_while_a_session_is_open(rank: int) -> None:
    usual = read_timeout(dist.new_group())
    with Session.open(cpu=True, timeout=LIMIT) as outer:
        assert read_timeout(dist.new_group()) == LIMIT == outer.timeout
        with Session.open(cpu=True, timeout=2 * LIMIT):
            assert read_timeout(dist.new_group()) == 2 * LIMIT
        assert read_timeout(dist.new_group()) == LIMIT
    assert read_timeout(dist.new_group()) == usual
