"""Calls of a model in a pipeline: evaluation, losses of the user, and what is refused."""

import pytest
import torch

from accel_state.errors import BackendError, CollectiveError, ConfigError, PrepareError
from accel_testing.equivalence.causal_lms import next_token_loss

from .pipelines import (
    Texts,
    accelerator_of,
    distance,
    gpt2,
    llama,
    loader,
    mixtral,
    optimizer_of,
)

pytestmark = pytest.mark.timeout(300)


def prepared(**config):
    accelerator = accelerator_of({"pp_size": 2}, config)
    return accelerator, accelerator.prepare(llama().double())


def batch_of(samples):
    return next(iter(loader(samples)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_v"])
def test_evaluation_returns_all_outputs_on_every_rank(rank, schedule):
    accelerator, model = prepared(schedule=schedule)
    expected = llama().double().eval()
    model.eval()
    for samples in (4, 4, 3):  # three samples are three micro-batches of one, or one of three
        batch = batch_of(samples)
        with torch.no_grad():
            found, wanted = model(**batch), expected(**batch)
        assert distance(found.logits, wanted.logits) <= 1e-10
        assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-10)
        assert found["logits"] is found[1]
    with torch.no_grad():
        assert distance(model(batch["input_ids"]).logits, expected(batch["input_ids"]).logits) <= 1e-10
    accelerator.end_training()


@pytest.mark.ranks(4)
def test_expert_parallel_ranks_evaluate_batches_of_different_sizes(rank):
    """And prompts whose generations end at different tokens, in as many micro-batches as divide both batches."""
    accelerator = accelerator_of({"pp_size": 2, "ep_size": 2}, {"num_microbatches": 4})
    index = accelerator.data_shard.index
    model, expected = accelerator.prepare(mixtral().double()).eval(), mixtral().double().eval()
    for samples in ((4, 4), (4, 2), (3, 4)):
        batch = batch_of(samples[index])
        with torch.no_grad():
            found, wanted = model(**batch), expected(**batch)
        assert distance(found.logits, wanted.logits) <= 1e-10
        assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-10)
    given, error = (batch, CollectiveError) if index else ({"labels": batch["labels"]}, BackendError)
    with torch.no_grad(), pytest.raises(error, match="a pipeline needs input_ids or inputs_embeds"):
        model(**given)
    prompts = Texts().tokens[:4, :4][: 4 - index]
    options = {"max_new_tokens": 2 + 3 * index, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    assert model.generate(prompts, **options).equal(expected.generate(prompts, **options))
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_outputs_can_stay_on_the_last_stage(rank):
    accelerator, model = prepared(outputs="last")
    with torch.no_grad():
        found = model.eval()(**batch_of(4))
    if rank == 1:
        assert found.logits.shape[0] == 4
    else:
        with pytest.raises(
            BackendError, match=r"outputs.logits .*last stage; nearest: PipelineParallelConfig\(outputs"
        ):
            print(found.logits)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_loss_of_the_user_trains(rank):
    """Without padding, so that the mean over samples is the mean over tokens."""

    def loss_fn(outputs, batch):
        return next_token_loss(outputs.logits, batch["labels"], outputs.logits.shape[-1]) * batch["factor"]

    accelerator = accelerator_of({"pp_size": 2}, {"loss_fn": loss_fn})
    model, expected = llama().double(), llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    tokens = Texts().tokens[:4]
    loss = model(input_ids=tokens, labels=tokens, factor=2.0).loss
    accelerator.backward(loss / 2)
    wanted = expected(input_ids=tokens, labels=tokens).loss
    wanted.backward()
    assert float(loss) == pytest.approx(2 * float(wanted), rel=1e-10)
    gradients = accelerator.full_gradients(model)
    named = dict(expected.named_parameters())
    assert gradients.keys() == named.keys()
    assert max(distance(gradients[name], one.grad) for name, one in named.items()) <= 1e-6  # norms are in fp32
    accelerator.end_training()


def assert_trains_nearly_as_one_process(precision, degrees):
    """Nearly, because losses of micro-batches are rounded on their own."""
    batches = [batch_of(4)] * 12
    plain = llama()
    optimizer = optimizer_of(plain)
    expected = []
    for batch in batches:
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert expected[-1] < 0.6 * expected[0]

    accelerator = accelerator_of(degrees, {}, mixed_precision=precision)
    model = llama()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    found = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    accelerator.end_training()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_in_one_process(rank, precision):
    assert_trains_nearly_as_one_process(precision, {"pp_size": 2})


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("axis", ["tp_size", "dp_shard_size"])
def test_mixed_precision_with_sharded_stages(rank, precision, axis):
    assert_trains_nearly_as_one_process(precision, {"pp_size": 2, axis: 2})


@pytest.mark.ranks(2)
def test_calls_that_cannot_be_exact_are_refused(rank):
    accelerator, model = prepared(num_microbatches=4)
    with pytest.raises(
        BackendError, match=r"batch of 6 samples does not divide into 4 micro-batches; nearest: .* of 8"
    ):
        model(**batch_of(6))
    batch = batch_of(4)
    with pytest.raises(BackendError, match=r"in training without labels; .*pass labels, or give the loss to"):
        model(batch["input_ids"])
    output = model(**batch)
    with pytest.raises(BackendError, match=r"outputs.logits of a model that trains in a pipeline: .*loss_fn="):
        print(output.logits)
    accelerator.backward(output.loss, retain_graph=True)
    with pytest.raises(BackendError, match="second backward of a loss whose gradients a pipeline computed"):
        accelerator.backward(output.loss)
    with pytest.raises(BackendError, match="output_hidden_states was given"):
        model(**batch, output_hidden_states=True)
    words = rf"is on another rank of the pipeline; call the model that prepare .*\(this is rank {rank}\)"
    with pytest.raises(BackendError, match=words):
        accelerator.unwrap_model(model)(batch["input_ids"])
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_split_model_cannot_be_prepared_again(rank):
    accelerator = accelerator_of({"pp_size": 2}, {})
    own = llama()
    accelerator.prepare(own)
    accelerator.free_memory()
    words = rf"rank {rank} has one part of this LlamaForCausalLM, .*Build the model again, and load the state"
    with pytest.raises((PrepareError, CollectiveError), match=words if rank == 0 else "rank"):
        accelerator.prepare(own)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_each_stage_loads_its_part_of_a_full_state_dict(rank):
    accelerator = accelerator_of({"pp_size": 2}, {})
    own, other = llama(), llama()
    for parameter in other.parameters():
        parameter.data.add_(1.0)
    model = accelerator.prepare(own)
    own.load_state_dict(other.state_dict())
    found = accelerator.get_state_dict(model)
    assert rank > 0 or found.keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in found.items())
    with pytest.warns(UserWarning, match=r"stages of this rank only; accelerator\.get_state_dict\(model\) gathers all"):
        part = model.state_dict()
    assert {name.removeprefix("module.") for name in part} < other.state_dict().keys()
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_norm_that_is_not_positive_or_not_finite_is_refused(rank):
    accelerator, model = prepared()
    accelerator.backward(model(**batch_of(4)).loss)
    with pytest.raises(BackendError, match=r"norm_type is -1.0; expected a positive number"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=-1.0)
    if rank == 0:
        next(model.parameters()).grad.fill_(torch.inf)
    culprit = "none on this rank" if rank else "model.embed_tokens.weight"
    with pytest.raises(BackendError, match=rf"gradient norm \(p=2\) is inf; gradients with nan or inf: {culprit}"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_models_that_cannot_be_split_are_refused(rank):
    accelerator = accelerator_of({"pp_size": 2}, {})
    with pytest.raises(PrepareError, match="Linear has no base_model and output embeddings"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(PrepareError, match="1 blocks do not make 2 pipeline stages; nearest: 1 stages"):
        accelerator.prepare(llama(blocks=1))
    model = llama()
    with pytest.raises(PrepareError, match=r"LBFGS computes its steps from all parameters, .*; nearest: AdamW"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    accelerator.end_training()
    with pytest.raises(ConfigError, match="no pipeline schedule '2f2b'"):
        accelerator_of({"pp_size": 2}, {"schedule": "2f2b"})
    with pytest.raises(ConfigError, match="1 micro-batches for a pipeline of 2 stages; nearest: num_microbatches=2"):
        accelerator_of({"pp_size": 2}, {"num_microbatches": 1})


@pytest.mark.ranks(2)
def test_compilation_over_stages_is_refused(rank):
    accelerator = accelerator_of({"pp_size": 2}, {}, dynamo_backend="eager")
    with pytest.raises(PrepareError, match="cannot be compiled over the stages of a pipeline; nearest: dynamo_backend"):
        accelerator.prepare(llama())
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_the_degree_selects_the_backend_and_explain_describes_it(rank):
    from accel import Accelerator
    from accel_state import ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    text = str(accelerator.explain())
    assert "backend pipeline: it serves the axes pp; pipeline of 2 stages, schedule 1f1b, 2 micro-batches" in text
    assert accelerator.data_shard.count == 1
    accelerator.end_training()


@pytest.mark.ranks(3)
def test_tied_weights_of_all_models_have_one_group(rank):
    accelerator = accelerator_of({"pp_size": 3}, {})
    tied = [accelerator.prepare(llama(tie=True)).tied for _ in range(2)]
    torch.distributed.barrier(torch.distributed.new_group())  # the middle rank has made as many groups of torch's
    if rank == 1:
        assert tied == [None, None]
    else:
        assert tied[0].group is tied[1].group
    accelerator.end_training()
    assert rank == 1 or tied[0].group not in torch.distributed.distributed_c10d._world.pg_map


@pytest.mark.ranks(2)
def test_weights_of_losses_count(rank):
    accelerator = accelerator_of({"pp_size": 2}, {}, gradient_accumulation_steps=2)
    model, expected = gpt2().double(), gpt2().double()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    batches, weights = list(loader())[:2], (5.0, 3.0)
    for batch, weight in zip(batches, weights, strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss * weight, weight=weight)
        (expected(**batch).loss * weight / sum(weights)).backward()
    found = accelerator.full_gradients(model)
    wanted = dict(expected.named_parameters())
    assert max(distance(found[name], one.grad) for name, one in wanted.items()) <= 1e-10
    optimizer.step()
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_generation_is_that_of_one_process(rank):
    """Prompts of several lengths; one sequence ends early."""
    accelerator, model = prepared(num_microbatches=2)
    plain = llama().double().eval()
    prompts = torch.tensor([[0, 0, 5, 9], [0, 7, 8, 3], [11, 12, 13, 14]])
    mask = (prompts != 0).long()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    free = plain.generate(prompts, attention_mask=mask, eos_token_id=None, **options)
    ended = int(free[1, 5])
    model.eval()
    for end in (None, ended):
        expected = plain.generate(prompts, attention_mask=mask, eos_token_id=end, **options)
        assert model.generate(prompts, mask, eos_token_id=end, **options).equal(expected)
    with pytest.raises(BackendError, match=r"generate\(do_sample=True\) .* greedily .*; nearest: do_sample=False"):
        model.generate(prompts, max_new_tokens=2, do_sample=True)
    with pytest.raises(BackendError, match=r"generate\(temperature=2.0\) .*; nearest: leave it out"):
        model.generate(prompts, max_new_tokens=2, temperature=2.0)
    with pytest.raises(BackendError, match=r"generate\(max_new_tokens=None\) .* at least 1"):
        model.generate(prompts)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_model_is_prepared_for_inference_only(rank):
    accelerator = accelerator_of({"pp_size": 2}, {})
    model, expected = accelerator.prepare_model(llama().double(), evaluation_mode=True), llama().double()
    batch = batch_of(4)
    with torch.no_grad():
        assert distance(model(**batch).logits, expected(**batch).logits) <= 1e-10
    accelerator.end_training()
