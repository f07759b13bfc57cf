"""Degrees for 70 and 405 billion parameters on 64 to 4,096 ranks, from their configurations alone."""

from itertools import pairwise
from math import prod
from typing import Any

import pytest

from accel_planner import Hardware, PlanError
from accel_planner.cost.axis_degrees import AXES, AxisDegrees, axis_degrees
from accel_planner.cost.axis_plan import AxisPlan, Batching, plan_degrees
from accel_planner.cost.transformer_shape import TransformerShape
from accel_planner.select_axes import TIE, plan_axes, propose_axes
from accel_state.errors import ConfigError

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
CONFIGS: dict[str, dict[str, Any]] = {
    "70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "405b": {
        **_LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
BATCH = Batching(global_batch=4096, micro_batch=1, length=8192)
FITTING = [("70b", 8), ("70b", 64), ("70b", 512), ("405b", 64), ("405b", 512), ("8x7b", 8), ("8x7b", 512)]


def shape(name: str) -> TransformerShape:
    return TransformerShape.from_config(CONFIGS[name])


def h100s(nodes: int, **changes: Any) -> Hardware:
    from dataclasses import replace

    return replace(Hardware.parse(f"{nodes}x8xH100"), **changes)


@pytest.mark.parametrize(("name", "billions"), [("70b", 70.55), ("405b", 405.85), ("8x7b", 46.70)])
def test_parameters_are_those_of_the_published_models(name: str, billions: float) -> None:
    assert shape(name).numel / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_parameters_are_those_of_the_models_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 8192}
    config = transformers.AutoConfig.for_model(kind, num_attention_heads=8, num_key_value_heads=4, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    own = TransformerShape.from_config(config.to_dict())
    assert own.numel == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


@pytest.mark.parametrize(("name", "nodes"), FITTING)
@pytest.mark.sampled(2)
def test_the_proposal_fits_and_its_degrees_multiply_to_the_world_size(name: str, nodes: int) -> None:
    hardware = h100s(nodes)
    plans = plan_axes(shape(name), hardware, BATCH)
    proposal = propose_axes(plans, hardware)
    degrees = proposal.plan.degrees
    assert proposal.plan.peak <= 0.9 * hardware.memory
    for plan in plans:
        assert prod(plan.degrees.size(axis) for axis in AXES) == 8 * nodes
        assert plan.degrees.tp <= 8
        assert "tp" not in plan.remote
        assert shape(name).heads % plan.degrees.tp == 0
        assert BATCH.micro_batches(plan.degrees) >= 1
    fitting = [plan for plan in plans if plan.peak <= 0.9 * hardware.memory]
    assert proposal.plan.seconds <= TIE * fitting[0].seconds
    explained = {reason.partition("=")[0] for reason in proposal.reasons[1:]}
    together = {"sync_each_batch"} if proposal.plan.sync_each_batch else set()
    assert explained == {axis for axis in degrees.active if axis != "dp_replicate"} | together


@pytest.mark.parametrize(("name", "nodes"), FITTING)
@pytest.mark.sampled(2)
def test_a_pipeline_is_proposed_only_where_memory_or_slow_links_demand_it(name: str, nodes: int) -> None:
    hardware = h100s(nodes)
    room = 0.9 * hardware.memory
    plans = plan_axes(shape(name), hardware, BATCH)
    found = propose_axes(plans, hardware).plan
    if found.degrees.pp == 1:
        return
    without = [plan for plan in plans if plan.degrees.pp == 1 and plan.peak <= room]
    assert not without or without[0].seconds > found.seconds
    fast = h100s(nodes, memory=10**13, remote=10**13)  # neither is scarce
    assert propose_axes(plan_axes(shape(name), fast, BATCH), fast).plan.degrees.pp == 1


def test_seventy_billion_need_no_pipeline_and_405_billion_on_4096_ranks_need_it_and_tensor_parallelism() -> None:
    hardware = h100s(512)
    small = propose_axes(plan_axes(shape("70b"), hardware, BATCH), hardware).plan.degrees
    large = propose_axes(plan_axes(shape("405b"), hardware, BATCH), hardware).plan.degrees
    assert small.active == ("dp_shard",)
    assert (large.pp, large.tp, large.dp_shard) == (16, 8, 32)


def test_long_sequences_on_4096_ranks_are_sharded_within_pipeline_stages_and_short_ones_are_not() -> None:
    hardware, long = h100s(512), Batching(1024, 1, 131072)
    proposal = propose_axes(plan_axes(shape("405b"), hardware, long), hardware)
    assert {"pp", "cp"} <= set(proposal.plan.degrees.active)
    assert any(reason.startswith("cp=") for reason in proposal.reasons)
    assert {plan.degrees.sequence for plan in plan_axes(shape("405b"), hardware, BATCH) if plan.degrees.pp > 1} == {1}


def test_stages_gather_and_hold_their_own_experts_alone() -> None:
    divided, whole = plan("8x7b", pp=4, dp_shard=2, ep=8), plan("8x7b", pp=4, dp_shard=16)
    assert divided.parameters == pytest.approx(whole.parameters, rel=0.01)
    own = 8 * shape("8x7b").feed_forwards  # of eight layers
    assert whole.communication - divided.communication == pytest.approx(own * 7 / 8 * (2 + 4), rel=0.01)
    assert divided.local.keys() | divided.remote.keys() == {"pp", "dp_shard", "ep"}


def test_short_shards_of_sequences_pay_the_latency_of_their_collectives() -> None:
    slow, none = h100s(8, latency=1e-3), h100s(8, latency=0.0)
    found = AxisDegrees(pp=2, cp=8, dp_replicate=4)
    times = [plan_degrees(shape("70b"), one, found, BATCH, checkpointing=False) for one in (slow, none)]
    waits = 40 * 1024 * 4 + 2 * 1024
    assert (times[0].seconds - times[1].seconds) * (1 - times[0].bubble) == pytest.approx(waits * 1e-3, rel=1e-6)


def test_more_memory_never_makes_the_proposal_slower_and_more_shards_never_take_more() -> None:
    seconds = []
    for size in (80, 120, 200, 1000):
        hardware = h100s(64, memory=size * 10**9)
        seconds.append(propose_axes(plan_axes(shape("405b"), hardware, BATCH), hardware).plan.seconds)
    assert all(later <= TIE * before for before, later in pairwise(seconds))
    held = [plan(dp_shard=shards, dp_replicate=64 // shards).parameters for shards in (1, 2, 8, 64)]
    assert held == sorted(held, reverse=True)
    assert held[0] == pytest.approx(64 * held[-1], rel=1e-6)


def plan(name: str = "70b", *, checkpointing: bool = False, sync: bool = False, **degrees: int) -> AxisPlan:
    found = AxisDegrees(**degrees)
    return plan_degrees(shape(name), h100s(8), found, BATCH, checkpointing=checkpointing, sync_each_batch=sync)


def test_each_axis_takes_its_part_of_the_memory() -> None:
    whole = plan(dp_replicate=64)
    assert whole.parameters == 4 * shape("70b").numel
    assert plan(dp_replicate=8, tp=8).parameters == pytest.approx(whole.parameters / 8, rel=0.001)
    assert plan(dp_replicate=8, pp=8).parameters == pytest.approx(whole.parameters / 8, rel=0.1)  # the head is on one
    for axis in ("cp", "sp"):
        assert plan(dp_replicate=8, **{axis: 8}).activations == pytest.approx(whole.activations / 8, rel=0.01)
    assert plan(dp_replicate=64, checkpointing=True).activations < whole.activations / 3
    experts = plan("8x7b", dp_replicate=8, ep=8)
    assert experts.parameters == pytest.approx(4 * shape("8x7b").numel / 8, rel=0.001)


def test_a_pipeline_waits_less_with_more_micro_batches() -> None:
    few, many = plan(pp=8, dp_replicate=8), plan(pp=8, tp=8)
    assert few.bubble == 7 / (512 + 7)
    assert many.bubble == 7 / (4096 + 7)


def test_groups_inside_a_node_use_its_links_and_others_the_network() -> None:
    hardware = h100s(8)
    degrees = AxisDegrees(pp=2, dp_shard=4, tp=8)
    assert degrees.is_local("tp", hardware)
    assert not degrees.is_local("dp_shard", hardware)
    found = plan_degrees(shape("70b"), hardware, degrees, BATCH, checkpointing=False)
    assert set(found.local) == {"tp"}
    assert set(found.remote) == {"pp", "dp_shard"}
    hidden = 8192 * 8192 * 2  # bytes of a sequence between blocks, of which each rank's ring sends 2 * 7/8
    assert found.local["tp"] == 40 * 1024 * 4 * 2 * (hidden * 7 // 8)


def test_experts_are_divided_only_where_there_are_some() -> None:
    found = list(axis_degrees(shape("8x7b"), h100s(8), global_batch=4096, micro_batch=1, length=8192))
    assert {degrees.ep for degrees in found} == {1, 2, 4, 8}
    assert any(degrees.ep > 1 and degrees.pp > 1 and degrees.tp > 1 for degrees in found)
    assert any(degrees.ep > 1 and degrees.tp > 1 and degrees.cp > 1 for degrees in found)
    dense = axis_degrees(shape("70b"), h100s(8), global_batch=4096, micro_batch=1, length=8192)
    assert {degrees.ep for degrees in dense} == {1}


def test_tensor_parallel_ranks_hold_and_compute_the_same_experts() -> None:
    both, alone = plan("8x7b", dp_shard=2, ep=8, tp=4), plan("8x7b", dp_shard=8, ep=8)
    experts = 4 * 32 * shape("8x7b").feed_forwards // 8
    dense = 4 * shape("8x7b").numel - 8 * experts
    assert both.parameters == pytest.approx(dense / 64 + experts / 2, rel=0.01)
    assert alone.parameters == pytest.approx(dense / 64 + experts / 8, rel=0.01)
    assert both.activations > plan("8x7b", dp_shard=16, tp=4).activations


def test_experts_are_sharded_over_context_parallel_ranks() -> None:
    over_both, over_one = plan("8x7b", dp_shard=4, ep=8, cp=2), plan("8x7b", dp_shard=8, ep=8)
    assert over_both.parameters == over_one.parameters
    micro = Batching(32, 1, 8192)
    alone = plan_degrees(shape("8x7b"), h100s(2), AxisDegrees(ep=8, cp=2), micro, checkpointing=False)
    fewer = plan_degrees(shape("8x7b"), h100s(2), AxisDegrees(ep=8, dp_shard=2), micro, checkpointing=False)
    assert alone.communication == pytest.approx(fewer.communication)


@pytest.mark.parametrize("degrees", [{"dp_shard": 64}, {"dp_shard": 8, "cp": 8}, {"dp_shard": 16, "tp": 4}], ids=str)
def test_gradients_of_an_accumulation_window_are_full_until_its_end(degrees: dict[str, int]) -> None:
    found = AxisDegrees(**degrees)
    one = Batching(found.readers, 1, 8192)
    closed = plan_degrees(shape("70b"), h100s(8), found, one, checkpointing=False)
    opened = plan_degrees(shape("70b"), h100s(8), found, BATCH, checkpointing=False)
    assert opened.communication - closed.communication == pytest.approx(4 * shape("70b").numel / found.tp, rel=1e-3)


def test_gradients_that_are_reduced_in_each_micro_batch_take_no_memory_and_are_sent_as_often() -> None:
    degrees = {"dp_replicate": 2, "dp_shard": 32}
    at_end, each = plan(**degrees), plan(**degrees, sync=True)
    count = BATCH.micro_batches(at_end.degrees)
    assert at_end.communication - each.communication == 4 * shape("70b").numel
    assert each.name == f"{at_end.name}+sync"
    numel = at_end.parameters // 4
    assert each.remote["dp_shard"] - at_end.remote["dp_shard"] == (count - 1) * 4 * numel * 31
    assert each.remote["dp_replicate"] == count * at_end.remote["dp_replicate"]
    plans = plan_axes(shape("70b"), h100s(8), BATCH)
    assert {found.degrees for found in plans if found.sync_each_batch} == {
        found.degrees for found in plans if found.degrees.pp == 1 and found.degrees.shards > 1
    } - {found.degrees for found in plans if BATCH.micro_batches(found.degrees) == 1}


def test_where_full_gradients_of_a_window_do_not_fit_they_are_reduced_in_each_micro_batch() -> None:
    hardware = h100s(64)
    proposal = propose_axes(plan_axes(shape("70b"), hardware, BATCH), hardware)
    assert (proposal.plan.degrees.active, proposal.plan.sync_each_batch) == (("dp_shard",), True)
    assert "GradientAccumulationPlugin" in proposal.reasons[-1]
    assert "; without sync_each_batch the best is " in proposal.reasons[-1]


def test_sequence_parallel_ranks_exchange_heads_and_repeat_those_of_keys() -> None:
    few, many = plan(dp_replicate=8, sp=8), plan(dp_replicate=4, sp=16)
    tokens = 8192 // 16
    # 64 heads of queries and outputs, and 8 of keys and values, of which each of 16 ranks needs one: 16.
    elements = tokens * (2 * 64 + 2 * 16) * 128 * 15 // 16
    assert many.remote["sp"] == 80 * BATCH.micro_batches(many.degrees) * 2 * elements * 2
    assert set(few.local) == {"sp", "dp_shard"}  # parameters are sharded over the same ranks
    found = axis_degrees(shape("70b"), h100s(8), global_batch=4096, micro_batch=1, length=8192)
    both = [(degrees.cp, degrees.sp, degrees.tp) for degrees in found]
    assert all(cp == 1 or sp == 1 for cp, sp, _ in both)
    assert all(64 % (sp * tp) == 0 for _, sp, tp in both)
    assert {sp for _, sp, _ in both} == {1, 2, 4, 8, 16, 32, 64}
    # Sequence-parallel ranks have one equal part of each sequence, context-parallel ranks two.
    for length, cp, sp in ((8191, (), ()), (8200, (2, 4), (2, 4, 8))):
        odd = axis_degrees(shape("70b"), h100s(8), global_batch=4096, micro_batch=1, length=length)
        wanted = {(1, 1), *((size, 1) for size in cp), *((1, size) for size in sp)}
        assert {(degrees.cp, degrees.sp) for degrees in odd} == wanted


def test_heads_of_keys_are_repeated_to_a_multiple_of_the_ranks_and_of_themselves() -> None:
    seven = TransformerShape.from_config({**CONFIGS["70b"], "num_attention_heads": 56, "head_dim": 128})
    batch = Batching(global_batch=8, micro_batch=1, length=7 * 1024)
    found = plan_degrees(seven, h100s(1), AxisDegrees(sp=7), batch, checkpointing=False)
    # 56 heads of queries and outputs, and 8 of keys and values, each of which is repeated 7 times: 56.
    elements = 1024 * (2 * 56 + 2 * 56) * 128 * 6 // 7
    assert found.local["sp"] == 80 * 8 * 2 * elements * 2


def test_shards_over_the_ranks_of_a_node_share_its_link_with_tensor_parallel_groups_alone() -> None:
    hardware = h100s(8, flops=1e30, local=1e30, latency=0.0)
    for degrees in (AxisDegrees(dp_shard=64), AxisDegrees(dp_shard=8, cp=8), AxisDegrees(dp_shard=16, tp=4)):
        found = plan_degrees(shape("70b"), hardware, degrees, BATCH, checkpointing=False)
        assert found.seconds == pytest.approx(found.remote["dp_shard"] * degrees.tp / hardware.remote, rel=1e-6)


def test_the_stage_with_the_most_layers_determines_the_time() -> None:
    hardware = h100s(8, local=1e30, remote=1e30, latency=0.0)
    found = plan_degrees(shape("70b"), hardware, AxisDegrees(pp=64), BATCH, checkpointing=False)
    even = shape("70b").flops(4096, 8192) / 64 / hardware.flops
    assert found.seconds * (1 - found.bubble) == pytest.approx(even * 2 * 64 / 80, rel=1e-6)


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"nothing fits 8 nodes.* too much"):
        propose_axes(plan_axes(shape("405b"), h100s(8), BATCH), h100s(8))
    with pytest.raises(ConfigError, match=r"global_batch=3 does not divide .* nearest: global_batch=4"):
        plan_axes(shape("70b"), h100s(8), Batching(3, 2, 8192))
    plan_axes(shape("70b"), h100s(8), Batching(4, 2, 8192))
    with pytest.raises(ConfigError, match="margin is 1; expected a fraction from 0 and below 1"):
        propose_axes([plan(dp_shard=64)], h100s(8), margin=1)
    for field, value in (("hidden_size", None), ("num_attention_heads", 0), ("head_dim", "64"), ("vocab_size", True)):
        with pytest.raises(ConfigError, match=field):
            TransformerShape.from_config({**CONFIGS["70b"], field: value})
    for field, value in (("mlp_only_layers", [0]), ("decoder_sparse_step", 2)):
        with pytest.raises(ConfigError, match=rf"{field} is .*only models of equal blocks"):
            TransformerShape.from_config({**CONFIGS["8x7b"], field: value})
    with pytest.raises(ConfigError, match="model_type 'gpt2' has blocks that are not described here"):
        TransformerShape.from_config({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="the configuration of a llama has no num_hidden_layers"):
        TransformerShape.from_config({k: v for k, v in CONFIGS["70b"].items() if k != "num_hidden_layers"})
