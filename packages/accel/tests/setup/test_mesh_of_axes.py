"""Degrees of tensor, context, sequence and expert parallelism: loops train as in one process, checkpoints reshard."""

import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import (
    ExpertParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_state import ParallelismConfig, PrepareError, TopologyError
from accel_testing import RankPool
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, tiny_llama, tiny_mixtral, with_exact_loss
from accel_testing.equivalence.compare import assert_close_state

LENGTH, GLOBAL_BATCH, STEPS = 16, 16, 3
EXPERTS_NAME = "model.layers.*.mlp.experts"
Degrees = Mapping[str, Any]


def llama(*, tied: bool = False) -> nn.Module:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return with_exact_loss(tiny_llama(**heads, tie_word_embeddings=tied, use_cache=False).double())


def mixtral() -> nn.Module:
    return with_exact_loss(tiny_mixtral(use_cache=False).double())


def model_of(degrees: Degrees, *, tied: bool = False) -> nn.Module:
    return mixtral() if "ep_size" in degrees else llama(tied=tied)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=generator))


def batch_of(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens.clone()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(
    degrees: Degrees, *, accumulate: int = 2, tied: bool = False, bound: Callable[[nn.Module], None] | None = None
) -> dict[str, Any]:
    """A user's loop, which knows nothing of the axes; two micro-batches a step, clipped."""
    parallelism = ParallelismConfig(**degrees) if degrees else None
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism, gradient_accumulation_steps=accumulate)
    model = mixtral() if "ep_handler" in degrees else model_of(degrees, tied=tied)
    if bound is not None:
        bound(model)
    if accelerator.process_index:  # prepare has to give every rank the values of rank 0
        for parameter in model.parameters():
            parameter.data.add_(accelerator.process_index)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    size = GLOBAL_BATCH // accelerator.data_shard.count // accumulate
    rows_of_samples: Any = samples()
    loader: Any = DataLoader(rows_of_samples, batch_size=size, collate_fn=batch_of)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    meter = accelerator.meter() if "ep_handler" in degrees else None
    losses, norms, rows = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        rows.append(len(accelerator.gather_for_metrics(batch["input_ids"])))
    found = {
        "backend": accelerator.choice.name,
        "explained": str(accelerator.explain()),
        "losses": losses,
        "norms": norms,
        "rows": rows,
        "rate": scheduler.get_last_lr()[0],
        "dropped": None if meter is None else meter.read().dropped_choices,
        "local": {
            name.removeprefix("module."): tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
            for name, p in model.named_parameters()
        },
        "state": {name: value.clone() for name, value in accelerator.get_state_dict(model).items()},
    }
    accelerator.end_training()
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
    assert found["rate"] == pytest.approx(expected["rate"])
    assert found["rows"] == expected["rows"]
    assert_close_state(found["state"], expected["state"], rtol=0, atol=1e-10)


LAYOUTS: dict[str, Degrees] = {
    "tp2": {"tp_size": 2},
    "tp2 by the model's plan": {"tp_size": 2, "tp_handler": TorchTensorParallelConfig(plan="model")},
    "cp2": {"cp_size": 2},
    "cp2 ring": {"cp_size": 2, "cp_handler": TorchContextParallelConfig("alltoall", load_balance=False)},
    "tp2 fsdp2": {"tp_size": 2, "dp_shard_size": 2},
    "tp2 replicas2": {"tp_size": 2, "dp_replicate_size": 2},
    "cp2 fsdp2": {"cp_size": 2, "dp_shard_size": 2},
    "cp2 tp2": {"cp_size": 2, "tp_size": 2},
    "sp2": {"sp_size": 2},
    "sp2 fsdp2": {"sp_size": 2, "dp_shard_size": 2},
    "sp2 replicas2": {"sp_size": 2, "dp_replicate_size": 2},
    "sp2 tp2": {"sp_size": 2, "tp_size": 2},
    "sp4": {"sp_size": 4},
    "pp2 cp2": {"pp_size": 2, "cp_size": 2},
    "pp2 sp2": {"pp_size": 2, "sp_size": 2},
    "pp2 cp2 ring": {"pp_size": 2, "cp_size": 2, "cp_handler": TorchContextParallelConfig("alltoall")},
    "pp2 cp2 tp2": {"pp_size": 2, "cp_size": 2, "tp_size": 2},
    "pp2 sp2 replicas2": {"pp_size": 2, "sp_size": 2, "dp_replicate_size": 2},
}


@pytest.fixture(scope="module")
def expected(rank_pool: RankPool) -> dict[str, Any]:
    found: dict[str, Any] = rank_pool.run(train, {}, ranks=1)[0]
    return found


SLOW = ("cp2", "sp2", "sp2 replicas2", "sp2 tp2", "sp4", "pp2 sp2", "pp2 cp2 ring", "pp2 cp2 tp2", "pp2 sp2 replicas2")
"""Layouts that default tests cover elsewhere, or in another product of the same axes."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(LAYOUTS[name], id=name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS],
)
def test_an_unchanged_loop_trains_as_one_process(
    rank_pool: RankPool, expected: dict[str, Any], degrees: Degrees
) -> None:
    ranks = ParallelismConfig(**degrees).total_size
    found = rank_pool.run(train, degrees, ranks=ranks)
    assert_same(found[0], expected)
    assert found[0]["backend"] == ("pipeline" if "pp_size" in degrees else "fsdp")
    for axis in ("tp", "cp", "sp"):
        if (size := degrees.get(f"{axis}_size")) is not None:
            assert f"{axis}={size}" in found[0]["explained"]


def test_the_plugin_of_tensor_parallelism_is_a_degree() -> None:
    with pytest.raises(TopologyError, match=r"\(tp=2\) needs 2 processes, which does not match num_processes=1"):
        Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))


EXPERTS: dict[str, Degrees] = {
    "one process": {"ep_size": 1},
    "ep2": {"ep_size": 2},
    "ep2 fsdp2": {"ep_size": 2, "dp_shard_size": 2},
    "ep2 replicas2": {"ep_size": 2, "dp_replicate_size": 2},
    "fsdp2": {"ep_size": 1, "dp_shard_size": 2},
    "ep2 tp2": {"ep_size": 2, "tp_size": 2},
    "ep2 cp2": {"ep_size": 2, "cp_size": 2},
    "ep2 tp2 fsdp2": {"ep_size": 2, "tp_size": 2, "dp_shard_size": 2},
    "ep2 cp2 fsdp2": {"ep_size": 2, "cp_size": 2, "dp_shard_size": 2},
    "pp2 ep2": {"pp_size": 2, "ep_size": 2},
    "pp2 ep2 cp2": {"pp_size": 2, "ep_size": 2, "cp_size": 2},
    "pp2 ep2 fsdp2": {"pp_size": 2, "ep_size": 2, "dp_shard_size": 2},
    "pp2 ep2 tp2": {"pp_size": 2, "ep_size": 2, "tp_size": 2},
}


@pytest.fixture(scope="module")
def expected_of_experts(rank_pool: RankPool) -> dict[str, Any]:
    found: dict[str, Any] = rank_pool.run(train, EXPERTS["one process"], ranks=1)[0]
    return found


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ("ep2 fsdp2", (1, 96, 32)),
        ("pp2 ep2", (2, 96, 32)),
        pytest.param("pp2 ep2 cp2", (1, 96, 32), marks=pytest.mark.slow),
        pytest.param("pp2 ep2 fsdp2", (1, 96, 32), marks=pytest.mark.slow),
        pytest.param("pp2 ep2 tp2", (2, 96, 32), marks=pytest.mark.slow),
        pytest.param("ep2 tp2", (2, 96, 32), marks=pytest.mark.slow),
        pytest.param("ep2 cp2", (1, 96, 32), marks=pytest.mark.slow),
        pytest.param("ep2 tp2 fsdp2", (1, 96, 32), marks=pytest.mark.slow),
        pytest.param("ep2 cp2 fsdp2", (2, 24, 32), marks=pytest.mark.slow),
        pytest.param("ep2", (2, 96, 32), marks=pytest.mark.slow),
        pytest.param("ep2 replicas2", (2, 96, 32), marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_divided_experts_train_as_one_process(
    rank_pool: RankPool, expected_of_experts: dict[str, Any], degrees: str, shape: tuple[int, ...]
) -> None:
    ranks = ParallelismConfig(**EXPERTS[degrees]).total_size
    found = rank_pool.run(train, EXPERTS[degrees], ranks=ranks)[0]
    assert_same(found, expected_of_experts)
    assert found["backend"] == ("pipeline" if degrees.startswith("pp") else "fsdp")
    assert "ep=2" in found["explained"]
    assert found["local"]["model.layers.0.mlp.experts.gate_up_proj"] == shape


class Bounded:
    """The rule of capacity in one process: what experts return for dropped choices is multiplied by zero."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self._drop)

    def _drop(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, index, weights = args
        mask = torch.zeros_like(weights)
        room = [math.ceil(Fraction(str(self.factor)) * index.numel() / module.num_experts)] * module.num_experts
        for choice, token in itertools.product(range(index.shape[1]), range(index.shape[0])):
            expert = int(index[token, choice])
            mask[token, choice] = float(room[expert] > 0)
            room[expert] -= 1
        return hidden, index, weights * mask


@pytest.mark.parametrize(
    "degrees",
    [
        {"ep_size": 2},
        {"dp_replicate_size": 2},
        pytest.param({"dp_shard_size": 2}, marks=pytest.mark.slow),
        pytest.param({"ep_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow),
        pytest.param({"ep_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_experts_with_a_capacity_train_as_one_process_with_the_same_micro_batches(
    rank_pool: RankPool, degrees: Degrees
) -> None:
    parallelism = ParallelismConfig(**degrees)
    shards = parallelism.data_parallel_size * parallelism.size("pp")  # a pipeline of two has two micro-batches
    expected = rank_pool.run(train, {"ep_size": 1}, accumulate=2 * shards, bound=Bounded(0.75), ranks=1)[0]
    bounded = {**degrees, "ep_handler": ExpertParallelConfig(capacity_factor=0.75)}
    found = rank_pool.run(train, bounded, ranks=ParallelismConfig(**degrees).total_size)
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-10)
    assert_close_state(found[0]["state"], expected["state"], rtol=0, atol=1e-10)
    assert 0.25 <= found[0]["dropped"] == found[1]["dropped"] < 0.5


def test_undivided_experts_drop_the_choices_that_divided_ones_drop(rank_pool: RankPool) -> None:
    """Two ranks that have all experts, and one process, drop what two expert-parallel ranks drop of the same tokens."""
    handler = {"ep_handler": ExpertParallelConfig(capacity_factor=0.75)}
    divided = rank_pool.run(train, {"ep_size": 2, **handler}, ranks=2)[0]
    sharded = rank_pool.run(train, {"dp_shard_size": 2, **handler}, ranks=2)[0]
    alone = rank_pool.run(train, handler, accumulate=4, ranks=1)[0]
    assert (divided["backend"], sharded["backend"], alone["backend"]) == ("fsdp", "fsdp", "single")
    for found in (sharded, alone):
        assert found["norms"] == pytest.approx(divided["norms"], rel=1e-10)
        assert_close_state(found["state"], divided["state"], rtol=0, atol=1e-10)
        assert found["dropped"] == divided["dropped"] >= 0.25


def test_a_capacity_without_experts_is_refused() -> None:
    handler = ExpertParallelConfig(capacity_factor=0.75)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(ep_handler=handler))
    model = llama()
    with pytest.raises(PrepareError, match=r"LlamaForCausalLM has no module of experts.*nearest: ep_handler=None"):
        accelerator.prepare(model, optimizer_of(model))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ep2", "one process"),
        ("ep2 tp2", "ep2"),
        pytest.param("ep2 fsdp2", "ep2", marks=pytest.mark.slow),
        pytest.param("ep2", "ep2", marks=pytest.mark.slow),
        pytest.param("ep2", "ep2 tp2", marks=pytest.mark.slow),
        pytest.param("ep2 cp2", "ep2 tp2", marks=pytest.mark.slow),
        pytest.param("one process", "ep2 cp2", marks=pytest.mark.slow),
        pytest.param("fsdp2", "ep2 fsdp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_divided_experts_resume_in_mid_window_at_other_degrees(
    rank_pool: RankPool, expected_of_experts: dict[str, Any], tmp_path: Path, first: str, second: str
) -> None:
    folder = str(tmp_path / "state")
    before, after = EXPERTS[first], EXPERTS[second]
    rank_pool.run(stop_in_mid_window, before, folder, ranks=ParallelismConfig(**before).total_size)
    found = rank_pool.run(resume, after, folder, ranks=ParallelismConfig(**after).total_size)[0]
    assert_close_state(found, expected_of_experts["state"], rtol=0, atol=1e-10)


def test_a_layer_is_sharded_over_both_axes(rank_pool: RankPool) -> None:
    found = rank_pool.run(train, LAYOUTS["tp2 fsdp2"], tied=True, ranks=4)[0]
    assert found["local"]["model.layers.0.self_attn.q_proj.weight"] == (8, 32)
    assert found["local"]["model.layers.0.self_attn.o_proj.weight"] == (16, 16)
    assert found["local"]["model.norm.weight"] == (16,)
    assert_same(found, rank_pool.run(train, {}, tied=True, ranks=1)[0])


CHANGES = [
    ("tp2", ""),
    ("", "tp2"),
    ("tp2", "fsdp2"),
    pytest.param("tp2 fsdp2", "tp2", marks=pytest.mark.slow),
    ("sp2 fsdp2", ""),
    pytest.param("", "sp2", marks=pytest.mark.slow),
    pytest.param("sp2", "cp2 tp2", marks=pytest.mark.slow),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_run_resumes_in_mid_window_at_other_degrees(
    rank_pool: RankPool, expected: dict[str, Any], tmp_path: Path, first: str, second: str
) -> None:
    every = {**LAYOUTS, "": {}, "fsdp2": {"dp_shard_size": 2}}
    folder = str(tmp_path / "state")
    before, after = (every[name] for name in (first, second))
    ranks = [ParallelismConfig(**degrees).total_size for degrees in (before, after)]
    rank_pool.run(stop_in_mid_window, before, folder, ranks=ranks[0])
    found = rank_pool.run(resume, after, folder, ranks=ranks[1])[0]
    assert_close_state(found, expected["state"], rtol=0, atol=1e-10)


def stop_in_mid_window(degrees: Degrees, folder: str) -> None:
    part(degrees, slice(0, 3), save=folder)


def resume(degrees: Degrees, folder: str) -> dict[str, torch.Tensor]:
    return part(degrees, slice(3, None), load=folder)


def part(degrees: Degrees, micro_batches: slice, *, load: str = "", save: str = "") -> dict[str, torch.Tensor]:
    """Part of the same training, with micro-batches taken by hand so that it may end within a window."""
    parallelism = ParallelismConfig(**degrees) if degrees else None
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism, gradient_accumulation_steps=2)
    model = model_of(degrees)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if load:
        accelerator.load_state(load)
    shard = accelerator.data_shard
    rows = samples()
    size = GLOBAL_BATCH // 2
    for start in range(0, len(rows), size)[micro_batches]:
        mine = rows[start : start + size][shard.index :: shard.count]
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch_of(mine)).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


def loss_of_buffers(degrees: Degrees, loss: bool) -> dict[str, Any]:
    """A step in which the user shards his buffers himself, and an evaluation of full sequences."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees) if degrees else None)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.stack(samples()[:GLOBAL_BATCH])
    shifted = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
    before = tokens.clone()
    with accelerator.maybe_context_parallel(buffers=[tokens, shifted], buffer_seq_dims=[1, 1]):
        within = tuple(tokens.shape)
        batch = {"input_ids": tokens, "labels": shifted if loss else None, "shift_labels": shifted}
        with torch.no_grad():
            evaluated = float(model(**batch).loss)
        accelerator.backward(model(**batch).loss)
    optimizer.step()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    found = {
        "within": within,
        "evaluated": evaluated,
        "restored": torch.equal(tokens, before),
        "logits": accelerator.gather_for_metrics(logits.argmax(-1)),
        "state": dict(accelerator.get_state_dict(model)),
    }
    accelerator.end_training()
    return found


@pytest.mark.parametrize(
    "layout", ["cp2", "pp2 cp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sp2", "pp2 sp2"))]
)
def test_buffers_that_a_user_shards_train_as_full_ones(rank_pool: RankPool, layout: str) -> None:
    expected = rank_pool.run(loss_of_buffers, {}, True, ranks=1)[0]
    degrees = LAYOUTS[layout]
    found = rank_pool.run(loss_of_buffers, degrees, False, ranks=ParallelismConfig(**degrees).total_size)
    assert (expected["within"], found[0]["within"]) == ((GLOBAL_BATCH, LENGTH), (GLOBAL_BATCH, LENGTH // 2))
    assert all(one["restored"] for one in found)
    assert_close_state(found[0]["state"], expected["state"], rtol=0, atol=1e-10)
    for one in found:
        assert one["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-10)
        assert torch.equal(one["logits"], expected["logits"])


def train_on_padding(degrees: Degrees) -> dict[str, Any]:
    """Two steps on rows with padding at the left or at the right, activations checkpointed, and an evaluation."""
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(**degrees) if degrees else None, activation_checkpointing=True
    )
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens, mask = torch.stack(samples()[:4]), torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, :5], mask[1, 11:] = 0, 0
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    found = {"losses": losses, "logits": logits, "state": dict(accelerator.get_state_dict(model))}
    accelerator.end_training()
    return found


def test_sequence_parallel_attention_does_not_see_padding(rank_pool: RankPool) -> None:
    expected = rank_pool.run(train_on_padding, {}, ranks=1)[0]
    found = rank_pool.run(train_on_padding, LAYOUTS["sp2"], ranks=2)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert (one["logits"] - expected["logits"]).abs().max() < 1e-10
    assert_close_state(found[0]["state"], expected["state"], rtol=0, atol=1e-10)


def prepare(degrees: Degrees, make: Any) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    try:
        accelerator.prepare(make())
    finally:
        accelerator.end_training()


def three_heads() -> nn.Module:
    return tiny_gpt2(n_embd=6, n_layer=1, n_head=3)


def eager_gpt2() -> nn.Module:
    model: Any = tiny_gpt2(n_embd=6, n_layer=1, n_head=2)
    model.set_attn_implementation("eager")
    made: nn.Module = model
    return made


@pytest.mark.parametrize(
    ("degrees", "make", "message"),
    [
        ({"cp_size": 2}, eager_gpt2, "computes attention by 'eager'.*nearest: attn_implementation=\"sdpa\""),
        ({"cp_size": 2}, lambda: nn.Linear(2, 2), "Linear is no transformers model"),
        ({"sp_size": 2}, eager_gpt2, "'eager', and sequence parallelism .*nearest: attn_implementation=\"sdpa\""),
        ({"sp_size": 2}, three_heads, "has 3 heads of attention, which 2 .* do not divide; nearest: sp_size=1, or cp"),
        (
            {"sp_size": 4},
            lambda: tiny_llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=24),
            "6 heads of attention, which 4 .*nearest: sp_size=3",
        ),
        ({"pp_size": 2}, lambda: nn.Linear(2, 2), "Linear has no base_model and output embeddings"),
        ({"pp_size": 2, "cp_size": 2}, eager_gpt2, "1 blocks do not make 2 pipeline stages; nearest: 1 stages"),
        ({"tp_size": 2}, lambda: nn.Linear(2, 2), "Linear has no attention, feed-forward .*plan={...}.*or tp_size=1"),
        ({"ep_size": 2}, llama, "LlamaForCausalLM has no module of experts.*nearest: ep_size=1"),
        ({"ep_size": 3}, mixtral, "model.layers.0.mlp.experts has 4 experts, which 3 .*nearest: 2 ranks"),
        (
            {"tp_size": 2, "ep_size": 2, "tp_handler": TorchTensorParallelConfig(plan={EXPERTS_NAME: "colwise"})},
            mixtral,
            r"plan gives model.layers.\*.mlp.experts a style, and ep_size divides .*nearest: leave it out of the plan",
        ),
        (
            {"tp_size": 2, "tp_handler": TorchTensorParallelConfig(plan={"wrong": "colwise"})},
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "names 'wrong', and Sequential has no such module",
        ),
        (
            {"tp_size": 2, "tp_handler": TorchTensorParallelConfig(plan={"0": "colwise_gather_output"})},
            lambda: nn.Sequential(nn.Linear(2, 3)),
            "0 has 3 output features, which 2 tensor-parallel ranks do not divide",
        ),
    ],
)
def test_models_that_an_axis_cannot_compute_are_refused_at_prepare(
    rank_pool: RankPool, degrees: Degrees, make: Any, message: str
) -> None:
    with pytest.raises(PrepareError, match=message):
        rank_pool.run(prepare, degrees, make, ranks=ParallelismConfig(**degrees).total_size)


def dropped_places(degrees: Degrees) -> dict[str, Any]:
    """Places of a sequence of ones that a prepared model's dropout sets to zero, in two calls."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    model = llama()
    torch.manual_seed(accelerator.process_index)  # as of a user who seeds each rank differently
    dropout = nn.Dropout(0.5)
    model.model.norm.register_forward_hook(lambda module, args, output: dropout(output))
    seen: list[torch.Tensor] = []
    dropout.register_forward_hook(lambda module, args, output: seen.append(output.detach() == 0))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.stack(samples()[:2])
    for _ in range(2):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    shard = accelerator.data_shard.index
    accelerator.end_training()
    return {"shard": shard, "places": torch.stack(seen)}


@pytest.mark.parametrize("degrees", [{"tp_size": 2, "dp_shard_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}])
@pytest.mark.sampled(1)
def test_only_ranks_of_one_tensor_parallel_group_draw_equal_dropout_masks(
    rank_pool: RankPool, degrees: Degrees
) -> None:
    found = rank_pool.run(dropped_places, degrees, ranks=4)
    assert [one["shard"] for one in found] == [0, 0, 1, 1]
    first, same, other, same_as_other = (one["places"] for one in found)
    assert 0.4 < first.double().mean() < 0.6
    assert torch.equal(first, same)
    assert torch.equal(other, same_as_other)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
