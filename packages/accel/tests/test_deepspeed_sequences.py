"""Ulysses through an Accelerator: ranks that share every sequence train as one process that has them whole."""

import copy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_state import BackendError, ConfigError, ParallelismConfig, PrepareError
from accel_state.errors import DataError
from accel_state.parallelism.axis_options import DeepSpeedSequenceParallelConfig
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

# Tokens that count in the samples of a batch: as many in both halves of it; with SHORT a second part can have none.
SHORT, LONG = (1, 3, 2, 2), (2, 5, 3, 4)
WORDS, WIDTH, HEADS, LENGTH, SAMPLES = 17, 8, 4, 6, 24


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(samples, tokens, heads, size), every token sees those before it."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    seen: torch.Tensor = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return seen.transpose(1, 2)


class Language(nn.Module):
    """One block of attention between an embedding with positions and a guess of the next word."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix, self.out, self.guess = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attend = accelerator.backend.layout.sequence_attention(causal)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        x = self.words(input_ids) + self.places(position_ids)
        parts = self.mix(x).unflatten(-1, (HEADS, -1)).chunk(3, -1)
        return self.guess(x + self.out(self.attend(*parts).flatten(2)))


def samples() -> list[dict[str, torch.Tensor]]:
    """Words, places, and the word after each; ends of different lengths count for nothing."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(SAMPLES):
        ids = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        following = torch.cat([ids[1:], torch.tensor([-100])])
        following[(SHORT if number % 12 < 4 else LONG)[number % 4] :] = -100
        rows.append({"input_ids": ids, "position_ids": torch.arange(LENGTH), "shift_labels": following})
    return rows


@dataclass(frozen=True)
class Plan:
    """How a run is spread; without a stage, without DeepSpeed."""

    stage: int | None = None
    shared: int = 1
    accumulate: int = 1
    precision: str = "no"
    epochs: int = 1
    load: str = ""
    save: str = ""


def train(plan: Plan) -> dict[str, torch.Tensor]:
    """An ordinary loop, and the full weights after it."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=plan.precision,
        deepspeed_plugin=None if plan.stage is None else {"zero_stage": plan.stage},
        parallelism_config=ParallelismConfig(sp_size=plan.shared),
        gradient_accumulation_steps=plan.accumulate,
    )
    torch.manual_seed(0)
    model = Language(accelerator)
    made = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    rows: Any = samples()
    loader = DataLoader(rows, batch_size=4 * plan.shared // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, made, loader)
    if plan.load:
        accelerator.load_state(plan.load)
    for batch in (batch for _ in range(plan.epochs) for batch in loader):
        with accelerator.accumulate(model):
            guess = model(batch["input_ids"], batch["position_ids"])
            loss = nn.functional.cross_entropy(guess.flatten(0, 1), batch["shift_labels"].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    if plan.save:
        accelerator.save_state(plan.save)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    accelerator.end_training()
    return state


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "stage", "accumulate"),
    [  # by default each pair of values at least once
        pytest.param(
            ranks, stage, accumulate, marks=() if (ranks // 2 + stage + accumulate // 2) % 2 else pytest.mark.slow
        )
        for ranks in (2, 4)
        for stage in (0, 1, 2, 3)
        for accumulate in (1, 3)
    ],
)
def test_ranks_with_half_of_each_sequence_train_as_one_process(
    rank_pool: RankPool, ranks: int, stage: int, accumulate: int
) -> None:
    """The first half of a sequence has more tokens that count than the second, and of some nothing is left there."""
    found = rank_pool.run(train, Plan(stage, 2, accumulate), ranks=ranks)[0]
    assert_close_state(found, rank_pool.run(train, Plan(accumulate=accumulate), ranks=1)[0], rtol=0, atol=1e-5)


def test_in_bf16_they_are_as_far_from_it_as_data_parallel_ranks(rank_pool: RankPool) -> None:
    shared, spread = (rank_pool.run(train, Plan(2, size, precision="bf16"), ranks=2)[0] for size in (2, 1))
    alone = rank_pool.run(train, Plan(), ranks=1)[0]
    assert_close_state(shared, alone, rtol=0, atol=2e-2)
    assert_close_state(spread, alone, rtol=0, atol=2e-2)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_full_sequences_and_back(rank_pool: RankPool, tmp_path: Path) -> None:
    """Shared by two ranks, then data-parallel at another stage, then one process, then shared by two of four."""
    plans = [(Plan(3, 2), 2), (Plan(1, 1), 2), (Plan(), 1), (Plan(2, 2), 4)]
    found, before = {}, ""
    for number, (plan, ranks) in enumerate(plans):
        folder = str(tmp_path / str(number))
        found = rank_pool.run(train, replace(plan, load=before, save=folder), ranks=ranks)[0]
        before = folder
    alone = rank_pool.run(train, Plan(epochs=4), ranks=1)[0]
    assert_close_state(found, alone, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_loader_shares_and_metrics_join(rank: int) -> None:
    """With DeepSpeed's own key; labels are shifted before they are cut."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 1, "sequence_parallel_size": 2})
    assert accelerator.parallelism_config.size("sp") == 2
    assert accelerator.data_shard.count == 1
    rows: Any = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in samples()]
    model = Language(accelerator)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(rows, 5))
    assert model.train_batch_size() == 5
    ids, following = [], []
    for batch in loader:
        assert batch["input_ids"].shape[1] == LENGTH // 2
        ids.append(accelerator.gather_for_metrics(batch["input_ids"]))
        following.append(accelerator.gather_for_metrics({"next": batch["shift_labels"]})["next"])
        with pytest.raises(DataError, match="expected tensors"):
            accelerator.gather_for_metrics(torch.zeros(()))
    expected = torch.stack([row["input_ids"] for row in rows])
    assert torch.equal(torch.cat(ids), expected)
    assert torch.equal(torch.cat(following), nn.functional.pad(expected[:, 1:], (0, 1), value=-100))
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_sum_with_its_weight_is_exact_as_well(rank: int) -> None:
    """``weight`` takes the place of what the loader says of a mean."""
    norms = []
    for weighted in (False, True):
        accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 0, "sequence_parallel_size": 2})
        torch.manual_seed(0)
        model = Language(accelerator)
        rows: Any = samples()
        model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(rows, 24))
        for batch in loader:
            guess = model(batch["input_ids"], batch["position_ids"]).flatten(0, 1)
            labels = batch["shift_labels"].flatten()
            if weighted:
                loss = nn.functional.cross_entropy(guess, labels, reduction="sum")
                accelerator.backward(loss, weight=(labels != -100).sum())
            else:
                accelerator.backward(nn.functional.cross_entropy(guess, labels))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), float("inf")))
        accelerator.end_training()
    assert torch.isclose(*norms, rtol=1e-5)


@pytest.mark.ranks(2)
def test_what_would_attend_to_a_part_only_is_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=ParallelismConfig(sp_size=2))
    with pytest.raises(PrepareError, match="nothing in this Linear attends over the parts"):
        accelerator.prepare_model(nn.Linear(2, 2))
    attend = accelerator.backend.layout.sequence_attention(causal)
    query, key = torch.zeros(1, 2, 4, 2), torch.zeros(1, 2, 3, 2)
    with pytest.raises(BackendError, match="3 key heads do not divide among the 2 ranks"):
        attend(query, key, key)
    assert type(copy.deepcopy(attend)) is type(attend)
    accelerator.end_training()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ({"sequence_parallel_size": 2}, 1, "parallelism_config has sp_size=1, and .* sequence_parallel_size = 2"),
        ({"zero_stage": "auto"}, 2, "the planner chooses when a model is prepared"),
    ],
)
def test_contradictions_are_refused(rank: int, options: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, deepspeed_plugin=options, parallelism_config=ParallelismConfig(sp_size=size))


def small_llama(**options: Any) -> Any:
    """Two blocks, with two heads of keys for four of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def train_llama(shared: int, ranks: int) -> list[torch.Tensor]:
    """An ordinary loop of Transformers over labels that are not shifted."""
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin={"zero_stage": 3} if ranks > 1 else None,
        parallelism_config=ParallelismConfig(sp_size=shared),
    )
    torch.manual_seed(0)
    model = small_llama()
    rows: Any = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in samples()]
    loader = DataLoader(rows, batch_size=5)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, made, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    own = accelerator.unwrap_model(model)
    state = [value.clone() for value in accelerator.get_state_dict(model).values()]
    accelerator.free_memory()
    assert own.config._attn_implementation == "sdpa"
    accelerator.end_training()
    return state


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_transformers_trains_as_in_one_process(rank_pool: RankPool) -> None:
    """Its loop stays as it is; the last batch is smaller than the others."""
    found = rank_pool.run(train_llama, 2, 2, ranks=2)[0]
    assert_close_state(found, rank_pool.run(train_llama, 1, 1, ranks=1)[0], rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_an_attention_by_name_is_for_models_of_transformers(rank: int) -> None:
    options = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    plan = ParallelismConfig(sp_size=2, sp_handler=options)
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=plan)
    with pytest.raises(ConfigError, match="sp_attn_implementation='sdpa' names an attention of Transformers"):
        accelerator.prepare_model(Language(accelerator))
    accelerator.end_training()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"attn_implementation": "eager"}, ConfigError, "nearest: sp_attn_implementation='sdpa'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, PrepareError, "has layers of linear_attention"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, PrepareError, "1 heads and 1 of keys"),
    ],
)
def test_models_of_transformers_that_cannot_share_are_refused(
    rank: int, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=ParallelismConfig(sp_size=2))
    with pytest.raises(error, match=words):
        accelerator.prepare_model(small_llama(**options))
    accelerator.end_training()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.ranks(2)
def test_packed_samples_are_refused_where_they_would_see_each_other(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=ParallelismConfig(sp_size=2))
    model = accelerator.prepare_model(small_llama())
    ids, places = torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None] + 3 * rank
    model(input_ids=ids, position_ids=places)
    with pytest.raises(BackendError, match="does not keep packed samples apart"):
        model(input_ids=ids, position_ids=places % 2)
    for shift in (-2, 3):  # another sample begins where rank 1's part does
        with pytest.raises(BackendError, match="does not keep packed samples apart"):
            model(input_ids=ids, position_ids=places + shift * rank)
    with pytest.raises(BackendError, match="got no position_ids"):
        model(input_ids=ids)
    accelerator.end_training()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.ranks(2)
def test_attention_to_later_tokens_is_refused_for_it_would_see_padding(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={}, parallelism_config=ParallelismConfig(sp_size=2))
    model = small_llama()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(PrepareError, match="attention to later tokens"):
        accelerator.prepare_model(model)
    accelerator.end_training()
