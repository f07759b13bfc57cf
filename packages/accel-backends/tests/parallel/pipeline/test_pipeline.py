"""The schedules of a pipeline give the gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.pipeline import Pipeline, StagePlan
from accel_backends.parallel.pipeline.ranges import balanced_ranges, stages_of_rank
from accel_backends.parallel.pipeline.schedules import schedule_kind
from accel_backends.parallel.pipeline.stages import Feed, drop_other_stages, make_stages
from accel_state.errors import BackendError
from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, tiny_llama

LENGTH, BATCH = 16, 2


def tiny_biogpt() -> nn.Module:
    """It gives the embedding of positions a mask and the positions."""
    from transformers import BioGptConfig, BioGptForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"), 0.0)
    return BioGptForCausalLM(BioGptConfig(num_hidden_layers=4, tie_word_embeddings=False, **sizes, **dropouts))


MODELS = {
    "llama": lambda: tiny_llama(num_hidden_layers=4),
    "gpt2": lambda: tiny_gpt2(n_layer=4, tie_word_embeddings=False),
    "biogpt": tiny_biogpt,
}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def next_token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def split(model: nn.Module, schedule: str) -> Pipeline:
    """The stages of this rank; the model keeps their modules only."""
    kind, per_rank = schedule_kind(schedule, None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = stages_of_rank(rank, ranks, per_rank, v_shaped=kind.v_shaped)
    causal_lm = CausalLM.of(model)
    ranges = balanced_ranges(causal_lm.block_bytes, ranks * per_rank)
    stages = make_stages(causal_lm, ranges, held)
    drop_other_stages(causal_lm, ranges, held)
    group = dist.group.WORLD
    assert group is not None
    return Pipeline(stages, StagePlan(held, ranks * per_rank, group, kind, torch.device("cpu")))


def assert_gradients_of_one_process(name, schedule, count=4):
    expected, model = MODELS[name]().double(), MODELS[name]().double()
    pipeline = split(model, schedule)
    for step in range(2):  # the second run reuses the schedule
        batches = [tokens(10 * step + number) for number in range(count)]
        losses = [next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch) for batch in batches]
        torch.stack(losses).sum().backward()
        found: dict[int, torch.Tensor] = {}

        def finish(number, output, batches=batches, found=found):
            found[number] = next_token_loss(output.logits, batches[number])
            return found[number]

        inputs = [{"input_ids": batch} for batch in batches]
        pipeline.run(Feed(inputs, (BATCH, LENGTH), finish), backward=True)
        if pipeline.plan.has_last:
            assert [float(found[n]) for n in range(count)] == pytest.approx([float(one) for one in losses], rel=1e-10)
    wanted = dict(expected.named_parameters())
    parameters = dict(model.named_parameters())
    assert len(parameters) < len(wanted)
    for key, parameter in parameters.items():
        assert distance(parameter.grad, wanted[key].grad) <= 1e-10, key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_two_stages_give_the_gradients_of_one_process(rank, name, schedule):
    assert_gradients_of_one_process(name, schedule)


@pytest.mark.ranks(2)
def test_a_block_without_its_stage_is_refused(rank):
    model = MODELS["llama"]()
    split(model, "1f1b")
    with pytest.raises(BackendError, match="is on another rank of the pipeline; call the model that prepare returned"):
        model(input_ids=tokens(0))
