"""An error in one stage of a pipeline is raised on every rank at once, and names the rank and the stage."""

from time import monotonic

import pytest
import torch

from accel_state.errors import BackendError, CollectiveError

from .pipelines import accelerator_of, distance, llama, loader, mixtral, optimizer_of

pytestmark = pytest.mark.timeout(300)


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no such gradient")


def fail_in_forward(block, args):
    raise ValueError("no such block")


def fail_in_backward(block, args):
    return Failing.apply(args[0]), *args[1:]


def block_of(accelerator, model, number):
    return accelerator.unwrap_model(model).model.layers[number]


def assert_fails_everywhere(accelerator, model, batch, culprit, stage, words, message):
    """And returns within seconds, although the timeout of collectives is minutes."""
    begin = monotonic()
    own = accelerator.process_index == culprit
    named = rf"rank {culprit} failed in the {words} of pipeline stage {stage}"
    with pytest.raises(ValueError if own else CollectiveError) as raised:
        model(**batch)
    assert monotonic() - begin < 20
    said = str(raised.value) if not own else " ".join(raised.value.__notes__)
    assert named in said
    assert own or message in said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
@pytest.mark.parametrize("called", [False, True], ids=["first call", "later call"])
@pytest.mark.sampled(1)
def test_a_stage_that_fails(rank, schedule, called):
    accelerator = accelerator_of({"pp_size": 2}, {"schedule": schedule})
    model, plain = llama().double(), llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    batch = next(iter(loader()))
    if called:
        model(**batch)
    for culprit, number, stage in ((0, 0, 0), (1, 2, {"1f1b": 1, "zero_bubble_v": 2}[schedule])):
        for hook, words, message in (
            (fail_in_forward, "forward of micro-batch 0", "ValueError: no such block"),
            (fail_in_backward, "backward", "ValueError: no such gradient"),
        ):
            handle = block_of(accelerator, model, number).register_forward_pre_hook(hook) if rank == culprit else None
            assert_fails_everywhere(accelerator, model, batch, culprit, stage, words, message)
            if handle is not None:
                handle.remove()
    accelerator.backward(model(**batch).loss)
    plain(**batch).loss.backward()
    named = dict(plain.named_parameters())
    found = accelerator.full_gradients(model)
    assert max(distance(found[name], one.grad) for name, one in named.items()) <= 1e-6  # norms are in fp32
    accelerator.end_training()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["dp_shard_size", pytest.param("dp_replicate_size", marks=pytest.mark.slow)])
def test_replicas_of_a_failed_stage_learn_of_it(rank, axis):
    accelerator = accelerator_of({"pp_size": 2, axis: 2}, {})
    model = llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    if rank == 3:
        block_of(accelerator, model, 2).register_forward_pre_hook(fail_in_forward)
    batch = next(iter(loader()))
    assert_fails_everywhere(accelerator, model, batch, 3, 1, "forward of micro-batch 0", "ValueError: no such block")
    accelerator.end_training()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "axis", ["dp_replicate_size", "ep_size", pytest.param("dp_shard_size", marks=pytest.mark.slow)]
)
def test_replicas_learn_of_a_batch_that_does_not_divide(rank, axis):
    accelerator = accelerator_of({"pp_size": 2, axis: 2}, {})
    model = (mixtral if axis == "ep_size" else llama)().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    failing = accelerator.data_shard.index == 1
    batch = next(iter(loader(3 if failing else 4)))
    words = (
        "^a batch of 3 samples does not divide" if failing else "rank 1 failed in the arguments of the call: BackendE"
    )
    with pytest.raises(BackendError if failing else CollectiveError, match=words):
        model(**batch)
    assert model(**next(iter(loader(4 if failing else 2)))).loss.isfinite()
    accelerator.end_training()


@pytest.mark.ranks(4)
def test_expert_parallel_ranks_multiply_losses_by_one_number(rank):
    """Because the gradients of experts are sums over the tokens of all of them, whose losses are multiplied later."""
    accelerator = accelerator_of({"pp_size": 2, "ep_size": 2}, {})
    model = mixtral().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    batch = next(iter(loader()))
    loss = model(**batch).loss
    with pytest.raises(BackendError, match=r"^losses are multiplied by 1 to 2 on ranks .*num_items_in_batch=1\)"):
        accelerator.backward(loss * (1 + accelerator.data_shard.index))
    assert all(parameter.grad is None for parameter in model.parameters())
    accelerator.backward(model(**batch, num_items_in_batch=1).loss, weight=2.0 + accelerator.data_shard.index)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_a_loss_of_the_user_that_fails(rank):
    def loss_fn(outputs, batch):
        raise ValueError("no such loss")

    accelerator = accelerator_of({"pp_size": 2}, {"loss_fn": loss_fn})
    model = llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    batch = next(iter(loader()))
    assert_fails_everywhere(accelerator, model, batch, 1, 1, "forward of micro-batch 0", "ValueError: no such loss")
    accelerator.end_training()


def fail_beyond_one_sample(block, args):
    if len(args[0]) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.ranks(2)
def test_micro_batches_are_halved_until_they_fit_all_stages(rank):
    accelerator = accelerator_of({"pp_size": 2}, {"num_microbatches": 2})
    model = llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    if rank == 1:
        block_of(accelerator, model, 2).register_forward_pre_hook(fail_beyond_one_sample)
    batch = next(iter(loader()))
    assert accelerator.find_micro_batch_size(lambda part: model(**part).loss, batch) == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    accelerator.end_training()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_call_without_labels_on_one_rank(rank, culprit):
    """In the first call and in a later one, in training and in evaluation, with gradients and without."""
    accelerator = accelerator_of({"pp_size": 2}, {})
    model, plain = llama().double(), llama().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    batch = next(iter(loader()))
    given = {name: value for name, value in batch.items() if name != "labels" or rank != culprit}
    expected, words = (
        (BackendError, "^LlamaForCausalLM was called in training without labels")
        if rank == culprit
        else (CollectiveError, rf"rank {culprit} failed in the arguments of the call: .* in training without labels")
    )
    ranks = rf"with labels on ranks {1 - culprit}, and without labels on ranks {culprit}, which are one pipeline"
    for _ in range(2):
        begin = monotonic()
        with pytest.raises(expected, match=words):
            model(**given)
        with torch.no_grad(), pytest.raises(BackendError, match=ranks):
            model(**given)
        model.eval()
        with pytest.raises(BackendError, match=ranks):
            model(**given)
        model.train()
        assert monotonic() - begin < 20
        assert model(**batch).loss.isfinite()
    accelerator.backward(model(**batch).loss)
    plain(**batch).loss.backward()
    found = accelerator.full_gradients(model)
    assert max(distance(found[name], one.grad) for name, one in plain.named_parameters()) <= 1e-6  # fp32 norms
    accelerator.end_training()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "axis",
    [
        "cp_size",
        "ep_size",
        pytest.param("tp_size", marks=pytest.mark.slow),
        pytest.param("dp_shard_size", marks=pytest.mark.slow),
    ],
)
def test_a_call_without_labels_among_sharded_stages(rank, axis):
    accelerator = accelerator_of({"pp_size": 2, axis: 2}, {})
    model = (mixtral if axis == "ep_size" else llama)().double()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    tokens = next(iter(loader()))["input_ids"]
    own = {} if rank == 2 else {"labels": tokens}
    with pytest.raises(BackendError if rank == 2 else CollectiveError, match="was called in training without labels"):
        model(input_ids=tokens, **own)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    accelerator.end_training()
