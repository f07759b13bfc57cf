"""A stage applies the part of the full model's tensor-parallel plan that its modules have."""

import pytest
from torch import nn

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.stage_plan import places_of, plan_of_stage
from accel_backends.parallel.pipeline.stages import drop_other_stages
from accel_state.errors import PrepareError
from accel_testing.equivalence.causal_lms import tiny_llama

LAYERS = "model.layers.*"


def stage(model: nn.Module, held: list[int]) -> nn.Module:
    causal_lm = CausalLM.of(model)
    drop_other_stages(causal_lm, [range(1), range(1, 2)], held)
    return model


def names(held: list[int]) -> list[str]:
    model = tiny_llama()
    places = places_of(model, 2, "derive")
    return [choice.pattern for choice in plan_of_stage(places, stage(model, held)).choices]


def test_stages_share_the_plan_of_the_full_model() -> None:
    full = [name for name, _, _ in places_of(tiny_llama(), 2, "derive")]
    first, last = names([0]), names([1])
    assert sorted(first + last) == sorted(full)
    assert "model.embed_tokens" in first
    assert "lm_head" in last
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}


def test_a_pattern_of_blocks_leaves_out_those_of_other_stages() -> None:
    model = tiny_llama()
    places = places_of(model, 2, {LAYERS: "replicate"})
    assert [choice.pattern for choice in plan_of_stage(places, stage(model, [1])).choices] == ["model.layers.1"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {f"{LAYERS}.self_attn.o_proj": "rowwise_scatter_sequence"},
            r"shards the sequence at model.layers.0.self_attn",
        ),
        ({"model.norm": "sequence_parallel_gather_output"}, r"shards the sequence at model.norm, .*full sequences"),
        ({"lm_head": "colwise_loss_parallel"}, r"output of lm_head sharded .*nearest: \"colwise_gather_output\""),
        ({"model.layers.*.nothing": "colwise"}, r"names 'model.layers.\*.nothing', and .* has no such module"),
    ],
)
def test_plans_that_stages_cannot_apply_are_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(PrepareError, match=words):
        places_of(tiny_llama(), 2, plan)
