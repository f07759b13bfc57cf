"""A user's loop over the stages of a pipeline trains as it does in one process."""

import pytest
import torch
from packaging.version import Version

from .pipelines import MODELS, accelerator_of, distance, full_state, loader, optimizer_of, train, train_plainly

pytestmark = pytest.mark.timeout(300)
NEEDS_2_11 = pytest.mark.skipif(Version(torch.__version__) < Version("2.11"), reason="several stages on a rank")


def assert_trains_as_one_process(name, degrees, config, *, accumulated=1, clip=None):
    replicas = degrees.get("dp_replicate_size", 1) * degrees.get("dp_shard_size", 1)
    expected, _, losses = train_plainly(name, accumulated=accumulated * replicas, clip=clip)
    accelerator = accelerator_of(degrees, config, gradient_accumulation_steps=accumulated)
    model = MODELS[name]().double()
    size = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
    assert sum(parameter.numel() for parameter in model.parameters()) < size
    found = train(accelerator, model, optimizer, batches, clip=clip)
    if replicas == 1:
        assert found == pytest.approx(losses, rel=1e-10)
    state = full_state(accelerator, model)
    wanted = expected.state_dict()
    assert set(state) == set(wanted)
    assert max(distance(state[key], value) for key, value in wanted.items()) <= 1e-10
    accelerator.end_training()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_two_stages_with_1f1b(rank, name):
    assert_trains_as_one_process(name, {"pp_size": 2}, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "schedule",
    [
        "gpipe",
        pytest.param("interleaved", marks=[NEEDS_2_11, pytest.mark.slow]),
        pytest.param("interleaved_zero_bubble", marks=NEEDS_2_11),
        pytest.param("zero_bubble_v", marks=[NEEDS_2_11, pytest.mark.slow]),
    ],
)
def test_two_stages_or_more_with_other_schedules(rank, schedule):
    assert_trains_as_one_process("llama tied", {"pp_size": 2}, {"schedule": schedule, "num_microbatches": 4})


@pytest.mark.ranks(2)
def test_accumulation_and_clipping(rank):
    """With GPT-2, because the norms of Llama round gradients to fp32, the scaled ones otherwise than the unscaled."""
    assert_trains_as_one_process("gpt2", {"pp_size": 2}, {}, accumulated=3, clip=0.5)


@pytest.mark.ranks(4)
def test_replicas_of_a_pipeline(rank):
    assert_trains_as_one_process("gpt2", {"pp_size": 2, "dp_replicate_size": 2}, {}, clip=0.5)


PRODUCTS = [
    ("llama tied", {"pp_size": 2, "tp_size": 2}, {}),
    ("gpt2", {"pp_size": 2, "dp_shard_size": 2}, {}),
    ("gpt2", {"pp_size": 2, "tp_size": 2}, {"schedule": "zero_bubble_v", "num_microbatches": 4}),
    ("llama tied", {"pp_size": 2, "dp_shard_size": 2}, {"schedule": "interleaved", "num_microbatches": 4}),
    ("llama", {"pp_size": 2, "dp_shard_size": 2}, {"schedule": "interleaved_zero_bubble", "num_microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "degrees", "config"), PRODUCTS)
def test_sharded_stages(rank, name, degrees, config):
    assert_trains_as_one_process(name, degrees, config, accumulated=2, clip=0.5)


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize("data", ["dp_shard_size", "dp_replicate_size"])
def test_stages_sharded_over_two_axes(rank, data):
    assert_trains_as_one_process("llama tied", {"pp_size": 2, "tp_size": 2, data: 2}, {}, accumulated=2, clip=0.5)


@pytest.mark.ranks(2)
def test_all_stages_have_the_values_of_rank_0(rank):
    model, expected = MODELS["llama"]().double(), MODELS["llama"]().double().state_dict()
    for parameter in model.parameters():
        parameter.data.add_(rank)
    accelerator = accelerator_of({"pp_size": 2}, {})
    model, _ = accelerator.prepare(model, optimizer_of(model))
    state = full_state(accelerator, model)
    assert set(state) == set(expected)
    assert all(state[name].equal(value) for name, value in expected.items())
    accelerator.end_training()


@pytest.mark.ranks(4)
def test_a_window_without_a_last_backward_has_the_gradients_of_all_shards(rank):
    expected, tokens = MODELS["gpt2"]().double(), next(iter(loader()))["input_ids"]
    (expected(input_ids=tokens, labels=tokens).loss / 2).backward()
    accelerator = accelerator_of({"pp_size": 2, "cp_size": 2}, {}, gradient_accumulation_steps=2)
    model = MODELS["gpt2"]().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    for number in range(2):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            if number == 0:
                accelerator.backward(loss)
    gradients = accelerator.full_gradients(model)
    for name, one in expected.named_parameters():
        assert distance(gradients[name], one.grad) <= 1e-10, name
    accelerator.end_training()
