"""Over tensor-parallel ranks a model trains as it does on one process."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel

from accel_backends.core.rebind import rebind
from accel_backends.ops.dtensor import placed_like
from accel_backends.parallel.derive import derive_plan
from accel_backends.parallel.tensor_parallel import apply_tensor_parallel
from accel_state.errors import PrepareError
from accel_testing.equivalence.causal_lms import tiny_gpt2

from .tiny_models import (
    MODELS,
    OPTIMIZERS,
    assert_states_equal,
    distance,
    full,
    llama,
    next_token_loss,
    tokens,
    train,
)


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def assert_trains_as_one_process(name, optimizer, dtype, tolerance, plan):
    expected = MODELS[name]().to(dtype)
    expected_optimizer = OPTIMIZERS[optimizer](expected.parameters())
    losses = train(expected, expected_optimizer)
    model = MODELS[name]().to(dtype)
    plan = plan(model) if callable(plan) else plan
    apply_tensor_parallel(model, tp_mesh(), plan)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    ours = OPTIMIZERS[optimizer](model.parameters())
    assert train(model, ours) == pytest.approx(losses, rel=tolerance)
    assert_states_equal(model, ours, expected, expected_optimizer, tolerance)


CASES = [
    ("llama", "sgd", "derive"),
    ("llama", "adamw", "model"),
    ("llama tied", "adamw", "derive"),
    ("gpt2", "sgd", "derive"),
    ("gpt2", "adamw", "derive"),
    ("mixtral", "adamw", "derive"),
    ("qwen3", "sgd", "derive"),
    ("qwen3", "adamw", "model"),
    ("llama tied", "sgd", lambda model: derive_plan(model, 2, sequence_parallel=True)),
    ("gpt2", "adamw", lambda model: derive_plan(model, 2, sequence_parallel=True)),
]


@pytest.mark.sampled(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "optimizer", "plan"), CASES, ids=lambda value: None if callable(value) else value)
def test_two_ranks_train_as_one_process(rank, name, optimizer, plan):
    assert_trains_as_one_process(name, optimizer, torch.float64, 1e-10, plan)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "optimizer"), [("llama tied", "adamw"), ("gpt2", "sgd")])
@pytest.mark.sampled(1)
def test_four_ranks_train_as_one_process(rank, name, optimizer):
    assert_trains_as_one_process(name, optimizer, torch.float64, 1e-10, "derive")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.slow
def test_four_ranks_train_as_one_process_in_single_precision(rank, name):
    assert_trains_as_one_process(name, "sgd", torch.float32, 1e-5, "derive")


@pytest.mark.ranks(2)
def test_logits_sharded_over_the_vocabulary_train_with_loss_parallel(rank):
    expected, model = llama(), llama()
    optimizers = [OPTIMIZERS["sgd"](one.parameters()) for one in (expected,)]
    losses = train(expected, optimizers[0], steps=2)
    apply_tensor_parallel(model, tp_mesh(), derive_plan(model, 2, loss_parallel=True))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with loss_parallel():
        logits = model(input_ids=tokens(0), use_cache=False).logits
        assert logits.to_local().shape[-1] == 32
        assert train(model, optimizer, steps=2) == pytest.approx(losses, rel=1e-5)
    assert_states_equal(model, optimizer, expected, optimizers[0], 1e-5)


@pytest.mark.sampled(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_accumulated_gradients_are_summed_once_and_replicas_have_the_same(rank, name):
    expected, model = MODELS[name]().double(), MODELS[name]().double()
    plan = derive_plan(model, 2, sequence_parallel=name == "llama")
    apply_tensor_parallel(model, tp_mesh(), plan)
    for one in (expected, model):
        for step in range(3):
            next_token_loss(one(input_ids=tokens(step), use_cache=False).logits, tokens(step)).backward()
    for (path, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert distance(full(parameter.grad), other.grad) < 1e-10, path
        if not isinstance(parameter, DTensor):
            replicas = [torch.empty_like(parameter.grad) for _ in range(2)]
            dist.all_gather(replicas, parameter.grad)
            assert torch.equal(*replicas)
        assert not isinstance(parameter.grad, DTensor) or parameter.grad.placements == parameter.placements


class Pair(nn.Module):
    """Two layers under names that no known block has."""

    def __init__(self, features=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, features), nn.Linear(features, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "plan",
    [
        {"first": "colwise", "last": "rowwise"},
        {"fir*": "colwise_gather_output", "last": "rowwise_split_input"},
        {"first": ColwiseParallel(), "last": RowwiseParallel()},
    ],
    ids=["names", "pattern", "torch's styles"],
)
def test_a_plan_may_be_given(rank, plan):
    expected, model = Pair().double(), Pair().double()
    apply_tensor_parallel(model, tp_mesh(), plan)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected(x).square().sum().backward()
    model(x).square().sum().backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert distance(full(parameter.grad), other.grad) < 1e-12
    assert model.first.weight.to_local().shape == (4, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("padding", [None, 1, 6])
def test_embeddings_are_sharded_with_their_gradients(rank, style, padding):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding))
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding))
    model.load_state_dict(expected.state_dict())
    apply_tensor_parallel(model, tp_mesh(), {"0": style})
    indices = torch.tensor([[0, 1, 6], [7, 6, 6]])
    for one in (expected, model):
        one(indices).square().sum().backward()
    assert torch.equal(model(indices), expected(indices))
    weight = model[0].weight
    assert weight.grad.placements == weight.placements
    assert distance(full(weight.grad), expected[0].weight.grad) < 1e-6


class ScaledEmbedding(nn.Embedding):
    """As that of Gemma."""

    def forward(self, input, *, scale=3):
        return super().forward(input) * scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
def test_an_embedding_computes_beside_its_lookup(rank, style):
    torch.manual_seed(0)
    expected = ScaledEmbedding(8, 4)
    model = nn.Sequential(ScaledEmbedding.from_pretrained(expected.weight.detach().clone(), freeze=False))
    apply_tensor_parallel(model, tp_mesh(), {"0": style})
    indices = torch.tensor([[0, 1, 6], [7, 6, 6]])
    for one in (expected, model):
        one(indices).square().sum().backward()
    assert torch.equal(model(indices), expected(indices))
    assert torch.equal(model[0](indices, scale=1), expected(indices, scale=1))
    assert distance(full(model[0].weight.grad), expected.weight.grad) < 1e-6


@pytest.mark.ranks(2)
def test_outputs_may_be_changed_in_place(rank):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)).double()
    model = deepcopy(expected)
    apply_tensor_parallel(model, tp_mesh(), {"0": "embedding_rowwise", "1": "colwise", "3": "rowwise"})
    for one in (expected, model):
        x = one[0](torch.tensor([[0, 1, 6]]))
        x += 1
        y = one[1:](x)
        y *= 2
        y.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert distance(full(parameter.grad), other.grad) < 1e-10, name


class CountedHeads(nn.Module):
    """As the attention of OPT, which views queries, keys and values by the number of heads, and tokens by -1."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x):
        heads = (
            one(x).view(len(x), -1, self.num_heads, self.head_dim) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in heads), is_causal=True)
        return self.out_proj(found.transpose(1, 2).reshape(*x.shape[:2], -1))


@pytest.mark.ranks(2)
def test_an_attention_that_counts_its_heads_computes_those_of_the_rank(rank):
    torch.manual_seed(0)
    expected = CountedHeads().double()
    model = deepcopy(expected)
    apply_tensor_parallel(model, tp_mesh())
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert distance(model(x).detach(), expected(x).detach()) < 1e-10


@pytest.mark.ranks(2)
def test_indices_that_no_rank_has_fail_as_in_one_process(rank):
    model = nn.Sequential(nn.Embedding(8, 4))
    apply_tensor_parallel(model, tp_mesh(), {"0": "embedding_rowwise"})
    if rank == 1:
        with pytest.raises(IndexError):
            model(torch.tensor([8]))


@pytest.mark.ranks(2)
def test_ranks_start_from_the_first_rank_s_values(rank):
    expected, model = Pair(), Pair()
    for parameter in model.parameters():
        parameter.data.mul_(rank + 1)
    apply_tensor_parallel(model, tp_mesh(), {"first": "colwise"})
    for name, value in expected.state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), value)


@pytest.mark.ranks(2)
def test_encoder_layer_of_torch_shards_its_feed_forward_network(rank):
    torch.manual_seed(0)
    expected = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    plan = apply_tensor_parallel(model, tp_mesh())
    assert "nn.MultiheadAttention is one function" in str(plan)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one in (expected, model):
        one(x).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert distance(full(parameter.grad), other.grad) < 1e-10, name
    assert isinstance(model.linear1.weight, DTensor)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "sequence_parallel"), [("qwen3", False), ("gpt2", False), ("llama tied", True)])
def test_tensor_parallel_layers_may_be_fully_sharded(rank, name, sequence_parallel):
    """Two data-parallel ranks of two tensor-parallel ranks each."""
    from torch.distributed.fsdp import fully_shard

    expected = MODELS[name]().double()
    expected_optimizer = OPTIMIZERS["adamw"](expected.parameters())
    model = MODELS[name]().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    apply_tensor_parallel(model, mesh["tp"], derive_plan(model, 2, sequence_parallel=sequence_parallel))
    for block in next(one for one in model.modules() if isinstance(one, nn.ModuleList)):
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        batch = tokens(step)
        next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch).backward()
        mine = batch.chunk(2)[rank // 2]
        next_token_loss(model(input_ids=mine, use_cache=False).logits, mine).backward()
        for one in (expected_optimizer, optimizer):
            one.step()
            one.zero_grad()
    assert_states_equal(model, optimizer, expected, expected_optimizer, 1e-10)


@pytest.mark.ranks(2)
def test_an_optimizer_that_has_stepped_goes_on_after_rebinding(rank):
    expected, model = MODELS["llama tied"]().double(), MODELS["llama tied"]().double()
    optimizers = [OPTIMIZERS["adamw"](one.parameters()) for one in (expected, model)]
    for one, optimizer in zip((expected, model), optimizers, strict=True):
        train(one, optimizer, steps=1)
    before = dict(model.named_parameters())
    apply_tensor_parallel(model, tp_mesh())
    after = dict(model.named_parameters())
    rebind(optimizers[1], before, after, convert=lambda new, key, value: placed_like(value, new))
    assert train(model, optimizers[1], steps=2) == pytest.approx(train(expected, optimizers[0], steps=2), rel=1e-10)
    assert_states_equal(model, optimizers[1], expected, optimizers[0], 1e-10)


@pytest.mark.ranks(2)
def test_a_copy_of_the_model_computes_with_its_own_parameters(rank):
    model = tiny_gpt2()
    apply_tensor_parallel(model, tp_mesh())
    copied = deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert copied(input_ids=tokens(0)).logits.abs().sum() > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_autocast_is_as_near_as_on_one_process(rank, name):
    expected, model = MODELS[name](), MODELS[name]()
    apply_tensor_parallel(model, tp_mesh(), derive_plan(model, 2, sequence_parallel=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [next_token_loss(one(input_ids=tokens(0)).logits.float(), tokens(0)) for one in (expected, model)]
    for loss in losses:
        loss.backward()
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-2)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert distance(full(parameter.grad), other.grad) < 0.1


REFUSED = {
    "no such module": ({"frist": "colwise"}, "names 'frist'.*nearest: first"),
    "no such style": ({"first": "columns"}, "no style 'columns' .*colwise"),
    "no linear layer": ({"": "colwise"}, "is a Pair, which is no linear layer"),
    "twice": ({"first": "colwise", "fir*": "rowwise"}, "two entries .* first.weight"),
    "no plan of its own": ("model", "Pair has no tp_plan of its own"),
    "no such plan": ("auto", "'auto'; expected \"derive\""),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("plan", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_plans_that_do_not_fit_are_refused_before_any_change(rank, plan, message):
    model = Pair()
    with pytest.raises(PrepareError, match=message):
        apply_tensor_parallel(model, tp_mesh(), plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_indivisible_sizes_name_the_module(rank):
    with pytest.raises(PrepareError, match=r"first has 7 output features, which 2 .* nearest: 1 ranks"):
        apply_tensor_parallel(Pair(7), tp_mesh(), {"first": "colwise"})
    with pytest.raises(PrepareError, match="last has 7 input features"):
        apply_tensor_parallel(Pair(7), tp_mesh(), {"last": "rowwise"})


@pytest.mark.ranks(2)
def test_second_application_and_half_a_tie_are_refused(rank):
    tied = llama(tie=True)
    with pytest.raises(PrepareError, match=r"embed_tokens.weight and lm_head.weight are one tied parameter"):
        apply_tensor_parallel(tied, tp_mesh(), {"lm_head": "colwise_gather_output"})
    model = Pair()
    apply_tensor_parallel(model, tp_mesh(), {"first": "colwise_gather_output"})
    with pytest.raises(PrepareError, match=r"first.weight is a DTensor already"):
        apply_tensor_parallel(model, tp_mesh(), {"last": "rowwise_split_input"})


@pytest.mark.ranks(2)
def test_sequences_that_do_not_divide_are_refused(rank):
    model = llama()
    apply_tensor_parallel(model, tp_mesh(), derive_plan(model, 2, sequence_parallel=True))
    with pytest.raises(PrepareError, match=r"sequences of 7 tokens .* nearest: pad them to 8"):
        model(input_ids=tokens(0, 7), use_cache=False)
