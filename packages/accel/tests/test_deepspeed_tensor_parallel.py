"""AutoTP through an Accelerator: tensor-parallel ranks train as one process, and states are those of full layers."""

from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_deepspeed import DeepSpeedBackend
from accel_state import BackendError, ConfigError, ParallelismConfig, PrepareError
from accel_state.errors import TopologyError
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program
from accel_testing.equivalence.programs import adamw, language_program

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def built(operation: str) -> bool:
    """Whether an operation is there already; building it takes longer than a test may."""
    from accel_deepspeed.library import extensions_folder

    return (extensions_folder() / operation / f"{operation}.so").exists()


needs_cpu_adam = pytest.mark.skipif(not built("cpu_adam"), reason="DeepSpeed's cpu_adam is not built")

WIDTH, INNER, OUT, SAMPLES = 6, 10, 3, 24
PARTS: dict[str, Any] = {
    "layer_specs": [
        {"patterns": [r".*gate_up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]
}


class Block(nn.Module):
    """A gated layer whose halves are one weight, and a layer that brings the parts together, with biases."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.drop(self.down(torch.sigmoid(gate) * up))


class Net(nn.Module):
    """Two blocks and a head; a layer that is frozen, a buffer, and a weight with two names."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.again, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.again.weight = self.blocks[0].norm_like = nn.Parameter(torch.eye(WIDTH))  # type: ignore[assignment]
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x)) * self.scale


@dataclass(frozen=True)
class Plan:
    """How a run is spread; without a stage, without DeepSpeed."""

    stage: int | None = None
    shared: int = 1
    accumulate: int = 2
    batches: tuple[int, int] = (0, 6)
    precision: str = "no"
    dropout: float = 0.0
    building: bool = False
    load: str = ""
    save: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    overlap: bool = False


def opened(plan: Plan) -> Accelerator:
    options = {"zero_stage": plan.stage, **plan.options}
    if plan.shared > 1:
        options["tensor_parallel"] = {"autotp_size": plan.shared, "partition_config": PARTS}
        options["tensor_parallel"]["tp_overlap_comm"] = plan.overlap
    return Accelerator(
        cpu=True,
        mixed_precision=plan.precision,
        deepspeed_plugin=None if plan.stage is None else options,
        gradient_accumulation_steps=plan.accumulate,
    )


def made(accelerator: Accelerator, plan: Plan) -> tuple[nn.Module, Any, Any]:
    """Prepared; the ranks begin with other weights, and those of rank 0 count."""
    torch.manual_seed(accelerator.process_index if not plan.building else 0)
    if plan.building:
        with accelerator.native(DeepSpeedBackend).zero_init():
            model = Net(plan.dropout)
    else:
        model = Net(plan.dropout)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    prepared: Any = accelerator.prepare(model, optimizer, scheduler)
    return prepared


def train(plan: Plan) -> dict[str, torch.Tensor]:
    """An ordinary loop over a part of the micro-batches, and the full weights after it, and norms."""
    accelerator = opened(plan)
    model, optimizer, scheduler = made(accelerator, plan)
    if plan.load:
        accelerator.load_state(plan.load)
    shard = accelerator.data_shard
    data = torch.randn(12, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
    norms = []
    for x in data[slice(*plan.batches)]:
        with accelerator.accumulate(model):
            mine = x.chunk(shard.count)[shard.index]
            accelerator.backward(model(mine).square().mean())
            if accelerator.sync_gradients:
                norms.append(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.1)).clone())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if plan.save:
        accelerator.save_state(plan.save)
    state = {name: value.float().clone() for name, value in accelerator.get_state_dict(model).items()}
    state["norms"] = torch.stack(norms) if norms else torch.zeros(0)
    accelerator.free_memory()
    accelerator.end_training()
    return state


def whole(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """On every rank."""
    return accelerator.backend.states.full_model(model, main_only=False)


QUICK = {(2, 2), (4, 0), (4, 1), (4, 3)}  # each stage once; the others are repetitions


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        pytest.param(ranks, stage, marks=() if (ranks, stage) in QUICK else pytest.mark.slow)
        for ranks in (2, 4)
        for stage in range(4)
    ],
)
@pytest.mark.sampled(1)
def test_tensor_parallel_ranks_train_as_one_process(rank_pool: RankPool, ranks: int, stage: int) -> None:
    """With biases, halves of one weight, a frozen layer, a tied weight, clipping, and other first weights on each.

    Of 4 ranks, the replicas are two.
    """
    found = rank_pool.run(train, Plan(stage, 2), ranks=ranks)[0]
    assert_close_state(found, rank_pool.run(train, Plan(), ranks=1)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.sampled(1)
def test_gradients_of_inputs_may_travel_meanwhile(rank_pool: RankPool, stage: int) -> None:
    found = rank_pool.run(train, Plan(stage, 2, overlap=True), ranks=2)[0]
    assert_close_state(found, rank_pool.run(train, Plan(), ranks=1)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_in_bf16_they_are_as_far_from_it_as_data_parallel_ranks(rank_pool: RankPool, stage: int) -> None:
    shared, spread = (rank_pool.run(train, Plan(stage, size, precision="bf16"), ranks=2)[0] for size in (2, 1))
    alone = rank_pool.run(train, Plan(), ranks=1)[0]
    assert_close_state(shared, alone, rtol=0, atol=2e-2)
    assert_close_state(spread, alone, rtol=0, atol=2e-2)


CHAINS = {
    "tp-z3 single tp-z0 tp-z1x2": [(Plan(3, 2), 2), (Plan(), 1), (Plan(0, 2), 2), (Plan(1, 2), 4)],
    "z2 tp-z2 ddp tp-z3x2": [(Plan(2), 2), (Plan(2, 2), 2), (Plan(), 2), (Plan(3, 2), 4)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "accumulate"),
    [
        pytest.param(CHAINS["tp-z3 single tp-z0 tp-z1x2"], 1, id="from stage 3", marks=pytest.mark.slow),
        pytest.param(CHAINS["tp-z3 single tp-z0 tp-z1x2"], 2, id="from stage 3, open window"),
        pytest.param(CHAINS["z2 tp-z2 ddp tp-z3x2"], 1, id="from stage 2"),
        pytest.param(CHAINS["z2 tp-z2 ddp tp-z3x2"], 2, id="from stage 2, open window", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_full_layers_and_back(
    rank_pool: RankPool, tmp_path: Path, chain: list[tuple[Plan, int]], accumulate: int
) -> None:
    """Three micro-batches each; with windows of two, the first and the third checkpoint are taken within one."""
    before = ""
    for number, (plan, ranks) in enumerate(chain):
        folder, part = str(tmp_path / str(number)), (3 * number, 3 * number + 3)
        run = replace(plan, load=before, save=folder, batches=part, accumulate=accumulate)
        found, before = rank_pool.run(train, run, ranks=ranks)[0], folder
    alone = rank_pool.run(train, Plan(batches=(0, 12), accumulate=accumulate), ranks=1)[0]
    del found["norms"], alone["norms"]
    assert_close_state(found, alone, rtol=0, atol=1e-5)


def language_in_parts() -> Program:
    """The usual language model, with the layers to share named by an attribute."""
    program = language_program(adamw)
    program.model._tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # type: ignore[assignment]
    return program


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["ds1:2/fp32/acc=3/weighted/tp=2", "ds3:2/fp32/acc=3/short/tp=2"])
def test_windows_are_exact(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(language_in_parts, [layout], pool=rank_pool)


@needs_cpu_adam
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_states_on_the_host_are_those_of_parts(rank_pool: RankPool, stage: int) -> None:
    parameters = "/offload_param=cpu" if stage == 3 else ""
    layout = f"ds{stage}:2/fp32/acc=3/tp=2/offload_optimizer=cpu{parameters}"
    assert_equivalent(language_in_parts, [layout], pool=rank_pool)


@pytest.mark.slow
def test_parts_are_cut_from_modules_that_stage_3_has_partitioned(rank_pool: RankPool) -> None:
    alone = rank_pool.run(train, Plan(), ranks=1)[0]
    for ranks in (2, 4):
        found = rank_pool.run(train, Plan(3, 2, building=True), ranks=ranks)[0]
        assert_close_state(found, alone, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.sampled(1)
def test_full_weights_are_handed_out_and_taken(rank: int, tmp_path: Path, stage: int) -> None:
    """By ``save_model``, within ``full_parameters``, and with a model that is only evaluated."""
    accelerator = opened(Plan(stage, 2))
    model, optimizer, _ = made(accelerator, Plan())
    torch.manual_seed(0)
    reference = Net().state_dict()
    state = whole(accelerator, model)
    assert_close_state(state, {name: reference[name] for name in state}, rtol=0, atol=0)
    assert tuple(accelerator.unwrap_model(model).blocks[0].down.weight.shape)[-1] != INNER
    with accelerator.backend.states.full_parameters(model), torch.no_grad():
        for name, parameter in accelerator.unwrap_model(model).named_parameters():
            assert torch.equal(parameter, reference[name])
            parameter.add_(1.0)
    changed = {name: reference[name] + (name != "scale") for name in state}
    assert_close_state(whole(accelerator, model), changed, rtol=0, atol=0)
    with accelerator.backend.states.full_parameters(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.0)
    accelerator.save_model(model, str(tmp_path / f"model{rank}"))
    accelerator.backward(model(torch.ones(4, WIDTH)).sum())
    optimizer.step()
    if rank == 0:
        from safetensors.torch import load_file

        saved = load_file(tmp_path / "model0" / "model.safetensors")
        assert torch.equal(saved["blocks.1.gate_up.weight"], changed["blocks.1.gate_up.weight"])
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_model_that_is_only_evaluated_is_tensor_parallel_at_stage_3(rank: int) -> None:
    accelerator = opened(Plan(3, 2))
    torch.manual_seed(0)
    reference, x = Net(), torch.ones(2, WIDTH)
    model = Net()
    model.load_state_dict(reference.state_dict())
    model = accelerator.prepare_model(model, evaluation_mode=True)
    assert torch.allclose(model(x), reference(x), atol=1e-6)
    state, expected = whole(accelerator, model), reference.state_dict()
    assert_close_state(state, {name: expected[name] for name in state}, rtol=0, atol=0)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_folders_of_deepspeed_hold_parts(rank: int, tmp_path: Path) -> None:
    """DeepSpeed's own, which DeepSpeed reads with as many ranks, and an Accelerator as whole ones."""
    from accel_state.collectives.objects import broadcast_object_list

    accelerator = opened(Plan(1, 2))
    model, _, _ = made(accelerator, Plan())
    box = [str(tmp_path)]
    broadcast_object_list(box, 0)
    accelerator.export_deepspeed(box[0])
    before = whole(accelerator, model)
    for read in (model.load_checkpoint, accelerator.import_deepspeed):
        with accelerator.backend.states.full_parameters(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert any(bool((value == 0).all()) for value in whole(accelerator, model).values())
        read(box[0])
        assert_close_state(whole(accelerator, model), before, rtol=0, atol=0)
    accelerator.end_training()


def drop_out(folder: str, load: str) -> float:
    """Steps with dropout of what every rank has; ranks came with random numbers of their own."""
    accelerator = opened(Plan(1, accelerator_size(), dropout=0.5))
    model, optimizer, _ = made(accelerator, Plan(dropout=0.5))
    if load:
        accelerator.load_state(load)
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    drawn = float(torch.rand(()))
    accelerator.free_memory()
    accelerator.end_training()
    return drawn


def accelerator_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def test_what_all_have_drops_out_alike_after_a_checkpoint_of_fewer_ranks_too(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    folders = [str(tmp_path / str(number)) for number in range(3)]
    rank_pool.run(drop_out, folders[0], "", ranks=1)
    for before, after in ((folders[0], folders[1]), (folders[1], folders[2])):
        drawn = rank_pool.run(drop_out, after, before, ranks=2)
        assert drawn[0] == drawn[1]


@pytest.mark.ranks(4)
def test_loaders_metrics_and_weights_count_samples_once(rank: int) -> None:
    """Pairs read the same; so what is gathered has every sample once, and sums with weights are exact."""
    accelerator = opened(Plan(2, 2, accumulate=1))
    assert accelerator.parallelism_config.size("tp") == 2
    assert (accelerator.data_shard.index, accelerator.data_shard.count) == (rank // 2, 2)
    torch.manual_seed(0)
    reference = Net()
    model = Net()
    model.load_state_dict(reference.state_dict())
    trained = [one for one in model.parameters() if one.requires_grad]
    rows = list(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(3)))
    loader: Any = DataLoader(rows, batch_size=3)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1), loader)
    assert model.train_batch_size() == 6
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    assert torch.equal(torch.cat(seen), torch.stack(rows))
    mine = torch.stack(rows[:3] if rank < 2 else rows[3:])
    accelerator.backward(model(mine).square().mean(1).sum(), weight=len(mine))
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    reference(torch.stack(rows)).square().mean(1).mean().backward()
    grads = [one.grad for one in reference.parameters() if one.grad is not None]
    assert torch.isclose(norm, nn.utils.get_total_norm(grads), rtol=1e-5)
    with pytest.raises(BackendError, match="a model with tensor-parallel layers"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0)
    accelerator.end_training()


class Within(nn.Module):
    """A norm of what is shared: each rank gets a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(4, 6), nn.Parameter(torch.ones(3)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x).unflatten(-1, (-1, 3)) * self.inner).flatten(-2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_would_drift_apart_are_found_by_the_first_backward(rank: int, stage: int) -> None:
    accelerator = opened(Plan(stage, 2))
    model = Within()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BackendError, match="have all of inner and other gradients of it"):
        accelerator.backward(model(torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).square().sum())
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_gradients_that_do_not_lie_in_order_are_summed_as_well(rank: int) -> None:
    """DeepSpeed by itself sums a copy of the gradient of a transposed input."""
    accelerator = opened(Plan(1, 2, accumulate=1))
    torch.manual_seed(0)
    enter, inner = nn.Linear(WIDTH, 5), Block(0.0)
    reference = nn.ModuleList([enter, inner])
    copied = nn.ModuleList([nn.Linear(WIDTH, 5), Block(0.0)])
    copied.load_state_dict(reference.state_dict())

    class Turned(nn.Module):
        def __init__(self, parts: nn.ModuleList) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.parts[0](x).t()
            return self.parts[1].down(torch.relu(self.parts[1].gate_up(turned).chunk(2, -1)[0]))

    ours, theirs = Turned(copied), Turned(reference)
    model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    accelerator.backward(model(x).square().sum())
    optimizer.step()
    made_by_hand = torch.optim.SGD(theirs.parameters(), lr=0.1)
    theirs(x).square().sum().backward()
    made_by_hand.step()
    assert_close_state(whole(accelerator, model), theirs.state_dict(), rtol=0, atol=1e-5)
    accelerator.end_training()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "degrees", "words"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, {"tp_size": 1}, "has tp_size=1, and .*autotp_size = 2"),
        ({"zero_stage": "auto"}, {"tp_size": 2}, "the planner looks at full layers"),
        (
            {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}},
            None,
            "DeepSpeed has sequence or tensor parallelism, not both",
        ),
        ({"tensor_parallel": {"autotp_sizes": 2}}, None, "did you mean 'autotp_size'"),
        ({"tensor_parallel": {"autotp_size": 3}}, None, "needs 3 processes|do not divide into groups of 3"),
    ],
)
def test_contradictions_are_refused(
    rank: int, options: dict[str, Any] | None, degrees: dict[str, int] | None, words: str
) -> None:
    plan = None if degrees is None else ParallelismConfig(**degrees)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, TopologyError), match=words):
        Accelerator(cpu=True, deepspeed_plugin=options, parallelism_config=plan)


@pytest.mark.ranks(4)
def test_sequences_and_layers_are_not_shared_at_once(rank: int) -> None:
    plan = ParallelismConfig(sp_size=2, tp_size=2)
    with pytest.raises(ConfigError, match="DeepSpeed has sequence or tensor parallelism, not both"):
        Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=plan)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("model", "parts", "stage", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), PARTS, 1, "AutoTP found no layer of this Sequential to shard"),
        (Within, None, 1, "DeepSpeed cannot prepare this Within: .*Please provide policy"),
        (lambda: Named(nn.Linear(4, 1)), PARTS, 1, r"Named.up.weight of \(1, 4\) leaves nothing of it to rank 1"),
        (lambda: Named(nn.Embedding(4, 4)), PARTS, 1, "is an embedding, of which AutoTP gives each rank some columns"),
        (lambda: Named(Odd()), PARTS, 1, "Named.up is a Odd, which AutoTP would share wrongly"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(rank: int, model: Any, parts: Any, stage: int, words: str) -> None:
    tensor = {"autotp_size": 2} if parts is None else {"autotp_size": 2, "partition_config": parts}
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": stage, "tensor_parallel": tensor})
    built = model()
    with pytest.raises(PrepareError, match=words):
        accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.1))
    accelerator.end_training()


class Named(nn.Module):
    """A layer under a name that is to be shared."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up, self.rest = up, nn.Linear(4, 4)


class Odd(nn.Module):
    """Its weight lies the other way round, as in Conv1D of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 6)), None


@pytest.mark.ranks(2)
def test_a_model_that_was_cut_is_not_prepared_again(rank: int) -> None:
    accelerator = opened(Plan(1, 2))
    model, _, _ = made(accelerator, Plan())
    own = accelerator.unwrap_model(model)
    accelerator.free_memory()
    with pytest.raises(PrepareError, match="has this rank's parts of layers only; build it anew"):
        accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_engines_of_one_process_have_tensor_parallel_groups_of_one_size(rank: int) -> None:
    """DeepSpeed's groups are those of the process; they go with the Accelerator that has them."""
    first = opened(Plan(1, 2))
    made(first, Plan())
    second = opened(Plan(1))
    with pytest.raises(BackendError, match="engines of this process have tensor-parallel groups of 2 ranks"):
        made(second, Plan())
    first.end_training()
    second.end_training()
    third = opened(Plan(1))
    made(third, Plan())
    third.end_training()


@pytest.mark.ranks(2)
def test_what_deepspeed_would_do_wrongly_beside_it_is_refused(rank: int) -> None:
    accelerator = opened(Plan(0, 2, precision="bf16"))
    model = Net()
    with pytest.raises(ConfigError, match="at stage 0 in bf16: DeepSpeed measures one rank's part"):
        accelerator.prepare(model, torch.optim.SGD([model.head.weight], lr=0.1))
    accelerator.end_training()
    accelerator = opened(Plan(0, 2))
    model = Net()
    with pytest.raises(PrepareError, match="Adafactor looks at full parameters"):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    accelerator.end_training()


# ------------------------------------------------------------------------------------------ models of Transformers


def small_llama(**options: Any) -> Any:
    """Two blocks, with two heads of keys for four of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 17}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def small_qwen(**options: Any) -> Any:
    """With norms within heads, whose gradients DeepSpeed adds up."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 17, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, **options))


BUILD: dict[str, Any] = {
    "llama": small_llama,
    "llama, tied": partial(small_llama, tie_word_embeddings=True),
    "llama, 3 heads of keys": partial(small_llama, hidden_size=24, num_attention_heads=6, num_key_value_heads=3),
    "qwen3": small_qwen,
}


def train_language(kind: str, shared: int, stage: int | None) -> dict[str, torch.Tensor]:
    """An ordinary loop of Transformers; the largest logit, which is of all words, is with the weights."""
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=None if stage is None else {"zero_stage": stage},
        parallelism_config=ParallelismConfig(tp_size=shared),
    )
    torch.manual_seed(0)
    model = BUILD[kind]()
    ids = torch.randint(0, 17, (12, 6), generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), DataLoader(rows, batch_size=4)
    )
    for batch in loader:
        result = model(**batch)
        accelerator.backward(result.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    state["logits"] = result.logits.detach()
    accelerator.free_memory()
    accelerator.end_training()
    return state


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("llama, tied", 1),
        ("llama, 3 heads of keys", 1),
        ("qwen3", 3),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        pytest.param("llama", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_a_model_of_transformers_trains_as_in_one_process(rank_pool: RankPool, kind: str, stage: int) -> None:
    found = rank_pool.run(train_language, kind, 2, stage, ranks=2)[0]
    assert_close_state(found, rank_pool.run(train_language, kind, 1, None, ranks=1)[0], rtol=0, atol=1e-5)


@needs_transformers
@pytest.mark.ranks(2)
def test_fewer_heads_than_ranks_are_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=ParallelismConfig(tp_size=2))
    model = small_llama(num_key_value_heads=1)
    with pytest.raises(PrepareError, match="has 1 heads of keys"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.end_training()
