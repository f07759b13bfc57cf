"""Planning at scale: seventy billion parameters on thousands of ranks, and the arithmetic of torch's own sharding."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.wrap_units import find_units
from accel_planner import Candidate, Hardware, candidates, optimizer_facts, plan_all, profile_model
from accel_planner.candidate import named
from benchmarks.planner import Llama


def llama_70b() -> nn.Module:
    return Llama(32000, 8192, heads=64, groups=8, hidden=28672, layers=80)


def small(width: int = 48) -> nn.Module:
    return Llama(100, width, heads=4, groups=2, hidden=3 * width + 1, layers=3)


def test_seventy_billion_parameters_on_up_to_4096_ranks_are_planned_in_seconds() -> None:
    with torch.device("meta"):
        model = llama_70b()
    begun = time.process_time()
    profile = profile_model(model, batch_size=1, seq_length=4096, policy="bf16")
    facts = optimizer_facts("adamw", profile.parameters, foreach=True)
    shares = []
    for nodes in (1, 8, 64, 512):
        plans = {plan.candidate.name: plan for plan in plan_all(profile, facts, Hardware.parse(f"{nodes}x8x80GB"))}
        shares.append(plans["fsdp:full_shard"].parts.parameters)
        assert plans["ddp"].parts.parameters == 4 * profile.numel
    assert time.process_time() - begun < 60  # about five seconds on a machine of its own
    assert profile.numel == pytest.approx(69e9, rel=0.01)
    assert [4 * profile.numel / share for share in shares] == pytest.approx(
        [8, 64, 512, 4096], rel=0.1
    )  # shards are padded


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """A group of that many ranks, of which only this one is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for name in find_units(model, FSDPConfig()).inside_out:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of rank 0's storages, and of the numbers in them, which optimizers keep states for."""
    local = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return sum(one.untyped_storage().nbytes() for one in local), sum(one.nbytes for one in local)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 12, 64, 1000, 4096])
@pytest.mark.sampled(2)
def test_shards_are_those_that_fully_shard_makes(ranks: int) -> None:
    with torch.device("meta"):
        model = small()
    profile = profile_model(model)
    facts = optimizer_facts("momentum", profile.parameters)
    plan = plan_all(profile, facts, Hardware(devices=max(2, ranks)), named_for(ranks))[0]
    with fake_group(max(2, ranks)):
        shard(model, (max(2, ranks),) if ranks > 1 else (2, 1))
        stored, numbers = sharded_bytes(model)
    assert (plan.parts.parameters, plan.parts.optimizer) == (stored, numbers)


def named_for(ranks: int) -> "list[Candidate]":
    """Sharded over all ranks; over one, that is as many replicas."""
    wanted = "fsdp:full_shard" if ranks > 1 else "fsdp:no_shard"
    return [c for c in named(candidates(max(2, ranks)), [wanted]) if c.name == wanted]


@pytest.mark.parametrize(("nodes", "devices"), [(2, 4), (16, 8), (512, 8)])
def test_hybrid_shards_are_those_that_fully_shard_makes(nodes: int, devices: int) -> None:
    with torch.device("meta"):
        model = small(64)
    profile = profile_model(model)
    facts = optimizer_facts("momentum", profile.parameters)
    hybrid = [c for c in candidates(devices, nodes) if c.name == "fsdp:hybrid_shard"]
    plan = plan_all(profile, facts, Hardware(devices=devices, nodes=nodes), hybrid)[0]
    with fake_group(nodes * devices):
        shard(model, (nodes, devices))
        stored, numbers = sharded_bytes(model)
    assert (plan.parts.parameters, plan.parts.optimizer) == (stored, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 512, 4096])
def test_shards_of_seventy_billion_parameters_are_those_that_fully_shard_makes(ranks: int) -> None:
    with torch.device("meta"):
        model = llama_70b()
    profile = profile_model(model)
    facts = optimizer_facts("momentum", profile.parameters)
    full = [c for c in candidates(ranks) if c.name == "fsdp:full_shard"]
    plan = plan_all(profile, facts, Hardware(devices=ranks), full)[0]
    with fake_group(ranks):
        shard(model, (ranks,))
        stored, numbers = sharded_bytes(model)
    assert (plan.parts.parameters, plan.parts.optimizer) == (stored, numbers)
