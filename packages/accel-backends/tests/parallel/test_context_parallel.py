"""Over context-parallel ranks a model trains as it does on one process."""

import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accel_backends.parallel.context_parallel import Context
from accel_backends.parallel.sdpa import apply_context_parallel, check_context_parallel, context_parallel_attention
from accel_backends.parallel.sequence_inputs import SequenceInputs, check_inputs
from accel_state.errors import BackendError, ConfigError, PrepareError

from .tiny_models import MODELS, OPTIMIZERS, assert_states_equal, distance, llama, tokens


def context(method="allgather", balanced=True):
    return Context(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), method, balanced)


METHODS = [("allgather", True), ("allgather", False), ("ring", True), ("ring", False), ("ulysses", True)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("method", "balanced"), METHODS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sampled(3)
def test_attention_over_shards_is_that_of_full_sequences(rank, method, balanced, causal):
    cp = context(method, balanced)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, 32, 8), (2, 6, 32, 8), (2, 6, 32, 4), (2, 12, 32, 4)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    expected.backward(grad)
    local = [cp.shard(tensor, 2).requires_grad_() for tensor in (q, k, v)]
    output = cp.attention(*local, causal=causal)
    output.backward(cp.shard(grad, 2))
    assert distance(output, cp.shard(expected, 2)) < 1e-12
    for found, wanted in zip(local, inputs, strict=True):
        assert distance(found.grad, cp.shard(wanted.grad, 2)) < 1e-12


def labelled(batch):
    """Labels of which some ranks have more than others."""
    labels = batch.clone()
    labels[0, : batch.shape[1] // 2] = -100
    return labels


def train_one_process(model, optimizer, steps=3, labelled=labelled):
    losses = []
    for step in range(steps):
        batch = tokens(step, 32)
        labels = labelled(batch)[:, 1:]
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_shards(model, optimizer, cp, steps=3):
    losses = []
    for step in range(steps):
        batch = tokens(step, 32)
        shard = cp.shard_batch({"input_ids": batch, "labels": labelled(batch)})
        labels = shard.pop("labels")
        shard.pop("shift_labels")
        logits = model(**shard, use_cache=False).logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = cp.token_mean(each, labels.flatten())
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_trains_as_one_process(name, method, balanced, dtype=torch.float64, tolerance=1e-10):
    expected = MODELS[name]().to(dtype)
    expected_optimizer = OPTIMIZERS["adamw"](expected.parameters())
    losses = train_one_process(expected, expected_optimizer)
    model = MODELS[name]().to(dtype)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    cp = context(method, balanced)
    apply_context_parallel(model, cp)
    assert train_shards(model, optimizer, cp) == pytest.approx(losses, rel=tolerance)
    assert_states_equal(model, optimizer, expected, expected_optimizer, tolerance)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("method", "balanced"), METHODS)
@pytest.mark.sampled(2)
def test_two_ranks_train_llama_as_one_process(rank, method, balanced):
    assert_trains_as_one_process("llama", method, balanced)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "method"), [("llama tied", "ring"), ("llama", "allgather"), ("gpt2", "ring"), ("gpt2", "ulysses")]
)
@pytest.mark.sampled(1)
def test_four_ranks_train_as_one_process(rank, name, method):
    assert_trains_as_one_process(name, method, balanced=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_checkpointed_activations_and_the_model_s_own_loss(rank, method):
    """transformers computes a sum of losses divided by the number that it is given."""
    expected, model = llama(), llama()
    batch = tokens(0, 32)
    loss = expected(input_ids=batch, labels=labelled(batch), use_cache=False).loss
    loss.backward()
    cp = context(method)
    apply_context_parallel(model, cp)
    model.gradient_checkpointing_enable()
    shard = cp.shard_batch({"input_ids": batch, "labels": labelled(batch)})
    count = (labelled(batch)[:, 1:] != -100).sum() / 2  # gradients are averaged over two ranks
    model(**shard, num_items_in_batch=count, use_cache=False).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        assert distance(parameter.grad / 2, other.grad) < 1e-5, name


@pytest.mark.ranks(2)
def test_a_given_number_divides_the_sum_over_all_tokens(rank):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    losses = torch.arange(16.0)

    def loss_of(*, inputs_embeds, num_items_in_batch, **_):
        return types.SimpleNamespace(loss=nn.Linear.forward(model, inputs_embeds).sum() / num_items_in_batch)

    model.forward = loss_of
    SequenceInputs(context()).attach(model)
    loss = model(inputs_embeds=losses.view(1, 16, 1), labels=torch.ones(1, 16), num_items_in_batch=4).loss
    loss.backward()
    dist.all_reduce(model.weight.grad)
    assert float(loss) == float(model.weight.grad) / 2 == losses.sum() / 4


def test_buffers_that_share_their_memory_are_shards_of_their_own():
    batch = torch.arange(18).view(2, 9)
    before, ids, labels = batch.clone(), batch[:, :-1], batch[:, 1:]
    second = types.SimpleNamespace(shard=lambda tensor, dim: tensor.chunk(2, dim)[1].clone())
    with SequenceInputs(second).sharded_buffers([ids, labels], [1, 1]):
        assert torch.equal(ids, before[:, 4:8])
        assert torch.equal(labels, before[:, 5:])
    assert torch.equal(batch, before)
    assert torch.equal(ids, before[:, :-1])
    assert torch.equal(labels, before[:, 1:])


@pytest.mark.ranks(2)
def test_an_evaluation_has_the_outputs_of_full_sequences(rank):
    expected, model, cp, batch = llama(), llama(), context(), tokens(0, 32)
    apply_context_parallel(model, cp)
    SequenceInputs(cp).attach(model)
    options = {"input_ids": batch, "labels": None, "output_hidden_states": True}
    with torch.no_grad():
        wanted, found = expected(**options), model(**options)
        assert distance(found.logits, wanted.logits) < 1e-5
        for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
            assert distance(one, other) < 1e-5
        with pytest.raises(BackendError, match=r"returned a tuple, and a context-parallel .*return_dict=True"):
            model(input_ids=batch, return_dict=False)
        with pytest.raises(BackendError, match=r"logits_to_keep=2 with a context-parallel model"):
            model(input_ids=batch, logits_to_keep=2)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_shards_of_sequences_may_be_fully_sharded_too(rank):
    """Two data-parallel ranks of two context-parallel ranks; parameters are sharded over all four."""
    from torch.distributed.fsdp import fully_shard

    expected = MODELS["llama"]().double()
    expected_optimizer = OPTIMIZERS["adamw"](expected.parameters())
    losses = train_one_process(expected, expected_optimizer, labelled=lambda batch: batch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = Context(mesh["cp"], "ring")
    model = MODELS["llama"]().double()
    apply_context_parallel(model, cp)
    for block in model.model.layers:
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step, wanted in enumerate(losses):
        mine = tokens(step, 32).chunk(2)[rank // 2]
        shard = cp.shard_batch({"input_ids": mine, "labels": mine})
        labels = shard.pop("shift_labels")
        logits = model(**{**shard, "labels": None}, use_cache=False).logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = cp.token_mean(each, labels.flatten())
        loss.backward()
        dist.all_reduce(loss := loss.detach())
        assert float(loss) / 4 == pytest.approx(wanted, rel=1e-10)
        optimizer.step()
        optimizer.zero_grad()
    assert_states_equal(model, optimizer, expected, expected_optimizer, 1e-10)


@pytest.mark.ranks(2)
def test_half_precision_is_as_near_as_one_process(rank):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 8, generator=generator) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cp = context("ring")
    output = cp.attention(*(cp.shard(tensor.bfloat16(), 2) for tensor in (q, k, v)), causal=True)
    assert output.dtype == torch.bfloat16
    assert distance(output.float(), cp.shard(exact, 2)) < 0.01


class Plain(nn.Module):
    """Self-attention that calls torch's function itself."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.project = nn.Linear(8, 24)
        self.output = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.output(attended.transpose(1, 2).flatten(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_plain_models_attend_over_shards_in_the_context(rank, method, causal):
    expected, model = Plain(is_causal=causal).double(), Plain(is_causal=causal).double()
    x = torch.randn(2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = expected(x)
    whole.square().sum().backward()
    cp = context(method)
    with context_parallel_attention(cp):
        output = model(cp.shard(x))
        output.square().sum().backward()
    assert distance(output, cp.shard(whole)) < 1e-12
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        assert distance(parameter.grad, other.grad) < 1e-12


@pytest.mark.ranks(2)
def test_attention_that_would_be_wrong_is_refused_in_the_context(rank):
    cp = context()
    x = torch.randn(2, 8, 8)
    with pytest.raises(BackendError, match=r"mask of shape \(8, 8\)"), context_parallel_attention(cp):
        Plain(attn_mask=torch.ones(8, 8, dtype=torch.bool))(x)
    with pytest.raises(BackendError, match=r"dropout 0.1, which is not supported"), context_parallel_attention(cp):
        Plain(dropout_p=0.1)(x)
    with pytest.raises(BackendError, match=r"nn.MultiheadAttention in context"), context_parallel_attention(cp):
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)
    uncalled = pytest.raises(BackendError, match=r"no F.scaled_dot_product_attention was called")
    with uncalled, context_parallel_attention(cp):
        torch.softmax(x @ x.transpose(1, 2), -1) @ x
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 6, 4)
    with pytest.raises(BackendError, match=r"no cache and no cross-attention"), context_parallel_attention(cp):
        F.scaled_dot_product_attention(q, k, k)


@pytest.mark.ranks(2)
def test_models_with_another_attention_are_refused_by_name(rank):
    from transformers import MistralConfig, MistralForCausalLM

    cp = context()
    with pytest.raises(PrepareError, match=r"LlamaForCausalLM computes attention by 'eager'.*\"sdpa\""):
        apply_context_parallel(llama(attn_implementation="eager"), cp)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(PrepareError, match=r"MistralForCausalLM has .*sliding"):
        apply_context_parallel(MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8)), cp)
    with pytest.raises(PrepareError, match=r"Plain is no transformers model; nearest: .*context_parallel_attention"):
        apply_context_parallel(Plain(), cp)


def test_models_with_another_loss_are_refused():
    import transformers as t

    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart, decoder = (t.BartConfig(vocab_size=64, d_model=8, **layers) for _ in range(2))
    check_inputs(llama(blocks=1))
    check_inputs(llama(blocks=1).model)
    for model, told in (
        (t.BertForMaskedLM(t.BertConfig(**sizes)), "computes the loss ForMaskedLM, not that of the next token"),
        (t.LlamaForSequenceClassification(t.LlamaConfig(**sizes)), "the loss ForSequenceClassification"),
        (t.BartForConditionalGeneration(bart), "is an encoder-decoder"),
        (t.BartForCausalLM(decoder), "takes no position_ids"),
        (t.RobertaForCausalLM(t.RobertaConfig(**sizes, is_decoder=True)), "positions that begin behind padding_idx"),
        (t.BertForPreTraining(t.BertConfig(**sizes)), "computes its loss itself"),
    ):
        with pytest.raises(PrepareError, match=rf"{type(model).__name__} .*{told}.*nearest: a causal language model"):
            check_inputs(model)


def test_attention_that_cannot_be_replaced_is_refused():
    import transformers as t

    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = t.FalconForCausalLM(t.FalconConfig(**sizes))
    with pytest.raises(PrepareError, match=r"FalconForCausalLM chooses its attention when it is built"):
        check_context_parallel(falcon, "allgather", 2)
    text, vision = t.LlamaConfig(**sizes), t.CLIPVisionConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    text.layer_types = ["linear_attention"]
    with torch.device("meta"):
        composite = t.LlavaForConditionalGeneration(t.LlavaConfig(text_config=text, vision_config=vision))
    with pytest.raises(PrepareError, match=r"LlavaForConditionalGeneration has layers of linear_attention"):
        check_context_parallel(composite, "allgather", 2)


@pytest.mark.ranks(2)
def test_batches_that_attention_would_misread_are_refused(rank):
    cp = context()
    ids = tokens(0, 16)
    mask = torch.ones_like(ids)
    assert set(cp.shard_batch({"input_ids": ids, "attention_mask": mask})) == {"input_ids", "position_ids"}
    mask[0, 0] = 0
    with pytest.raises(PrepareError, match=r"padding .*attention_mask has zeros"):
        cp.shard_batch({"input_ids": ids, "attention_mask": mask})
    with pytest.raises(PrepareError, match=r"packed sequences"):
        cp.shard_batch({"input_ids": ids, "position_ids": torch.arange(16).remainder(8).expand(2, 16)})
    with pytest.raises(PrepareError, match=r"15 tokens do not divide into 4 chunks.*pad them to 16"):
        cp.shard_batch({"input_ids": tokens(0, 15)})
    with pytest.raises(PrepareError, match=r"no input_ids or inputs_embeds"):
        cp.shard_batch({"pixels": ids})


@pytest.mark.ranks(2)
def test_models_refuse_padding_masks_and_caches_at_their_call(rank):
    from transformers.masking_utils import create_causal_mask

    model, cp = llama(), context()
    apply_context_parallel(model, cp)
    shard = cp.shard_batch({"input_ids": tokens(0, 16)})
    mask = torch.ones_like(shard["input_ids"])
    mask[0, 0] = 0
    with pytest.raises(BackendError, match=r"padding \(attention_mask has zeros\)"):
        model(**shard, attention_mask=mask, use_cache=False)
    ids = shard["input_ids"]
    embeddings, positions = model.get_input_embeddings()(ids), shard["position_ids"]
    assert create_causal_mask(model.config, embeddings, None, None, positions) is None
    for other in ({"block_sequence_ids": torch.zeros_like(ids)}, {"or_mask_function": lambda *at: at[3] < 4}):
        with pytest.raises(BackendError, match=r"a mask that is neither causal nor bidirectional.*cp_size=1"):
            create_causal_mask(model.config, embeddings, None, None, positions, **other)
    cache = model(**shard, use_cache=True).past_key_values
    with pytest.raises(BackendError, match=r"no cache"):
        model(**shard, past_key_values=cache, use_cache=True)
    with pytest.raises(ConfigError, match=r"no context-parallel method 'rings'; methods: allgather, ring, ulysses"):
        Context(cp.mesh, "rings")
