"""Where a process is in the mesh, and which plugins decide, under the names that Accelerate's users know."""

from importlib.util import find_spec
from typing import Any

import pytest
from torch import nn

from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel.utils import AORecipeKwargs
from accel_state import ParallelismConfig
from accel_testing import RankPool

AXES = {"dp_replicate": "data_parallel_rank", "dp_shard": "data_parallel_shard_rank"}


def places(strategy: str, degrees: dict[str, int]) -> tuple[dict[str, int], dict[str, int], bool]:
    """By our properties, by torch's own mesh, and whether to save."""
    accelerator = Accelerator(cpu=True, strategy=strategy, parallelism_config=ParallelismConfig(**degrees))
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    ours = {axis: getattr(accelerator, name) for axis, name in AXES.items()}
    theirs = {axis: mesh.get_local_rank(axis) if axis in mesh.mesh_dim_names else 0 for axis in AXES}
    assert (accelerator.tensor_parallel_rank, accelerator.context_parallel_rank) == (0, 0)
    assert accelerator.pipeline_parallel_rank == 0
    return ours, theirs, accelerator.should_save_model


@pytest.mark.parametrize(
    ("strategy", "degrees", "saving"),
    [
        ("ddp", {"dp_replicate_size": 4}, [True, False, False, False]),
        ("fsdp", {"dp_shard_size": 4}, [True] * 4),
        ("fsdp", {"dp_replicate_size": 2, "dp_shard_size": 2}, [True, True, False, False]),
    ],
)
def test_a_place_is_that_in_torchs_mesh(
    strategy: str, degrees: dict[str, int], saving: list[bool], rank_pool: RankPool
) -> None:
    found = rank_pool.run(places, strategy, degrees, ranks=4)
    assert [ours for ours, _, _ in found] == [theirs for _, theirs, _ in found]
    assert [saves for _, _, saves in found] == saving


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "sharded"), [("ddp", False), ("fsdp", True), ("fsdp1", False)])
def test_the_state_tells_of_plugins(strategy: str, sharded: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    accelerator.prepare(nn.Linear(2, 2))
    plugin = accelerator.state.fsdp_plugin
    assert isinstance(plugin, FullyShardedDataParallelPlugin) == (strategy != "ddp")
    assert accelerator.is_fsdp2 == accelerator.state.is_fsdp2 == accelerator.is_composable_parallelism_enabled
    assert accelerator.is_fsdp2 == sharded
    assert accelerator.state.deepspeed_plugin is None
    assert accelerator.state.parallelism_config is accelerator.parallelism_config


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.ranks(1)
def test_the_state_tells_of_deepspeeds_plugins() -> None:
    given = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    state = Accelerator(cpu=True, deepspeed_plugins=given).state
    assert list(state.deepspeed_plugins) == ["student", "teacher"]
    assert state.deepspeed_plugin.zero_stage == 2
    state.select_deepspeed_plugin("teacher")
    assert state.deepspeed_plugin.zero_stage == 3


@pytest.mark.parametrize(("given", "name"), [({}, "NO"), ({"mixed_precision": "fp8"}, "AO")])
def test_what_computes_in_8_bits_is_named(given: dict[str, Any], name: str) -> None:
    pytest.importorskip("torchao")
    handlers = [AORecipeKwargs(emulate=True)] if given else None
    assert Accelerator(cpu=True, kwargs_handlers=handlers, **given).fp8_backend == name
