"""Over expert-parallel ranks a model trains as it does on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accel_backends.parallel.expert_parallel import apply_expert_parallel
from accel_backends.parallel.router_loss import load_balancing_loss, sum_router_loss
from accel_state.errors import BackendError, PrepareError

from .tiny_models import OPTIMIZERS, assert_states_equal, distance, full, llama, mixtral, next_token_loss, tokens


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def global_batch(step):
    return torch.cat([tokens(10 * step + part) for part in range(2)])


def average_gradients(model):
    """What data parallelism does with everything but experts."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def assert_trains_as_one_process(optimizer, dtype, tolerance, bias=None):
    expected, model = mixtral().to(dtype), mixtral().to(dtype)
    if bias is not None:
        for one in (expected, model):
            bias(one)
    names = apply_expert_parallel(model, ep_mesh())
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.placements == (Shard(0),)
    assert experts.to_local().shape[0] == 4 // dist.get_world_size()
    expected_optimizer = OPTIMIZERS[optimizer](expected.parameters())
    ours = OPTIMIZERS[optimizer](model.parameters())
    for step in range(5):
        batch = global_batch(step)
        next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch).backward()
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        next_token_loss(model(input_ids=mine, use_cache=False).logits, mine).backward()
        average_gradients(model)
        for one in (expected_optimizer, ours):
            one.step()
            one.zero_grad()
    assert_states_equal(model, ours, expected, expected_optimizer, tolerance)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_ranks_train_as_one_process(rank, optimizer):
    assert_trains_as_one_process(optimizer, torch.float64, 1e-10)


@pytest.mark.ranks(4)
def test_four_ranks_train_as_one_process(rank):
    assert_trains_as_one_process("adamw", torch.float64, 1e-10)


@pytest.mark.ranks(2)
def test_two_ranks_train_as_one_process_in_single_precision(rank):
    assert_trains_as_one_process("sgd", torch.float32, 1e-5)


def starve(model):
    """Every token chooses the first two experts, so that the ranks of the others have none."""
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def choose(hidden, gate=gate):
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            scores = logits[:, :2].softmax(-1)
            return logits, scores, torch.tensor([0, 1]).expand(len(scores), 2)

        gate.forward = choose


@pytest.mark.ranks(4)
def test_ranks_whose_experts_have_no_tokens_take_part(rank):
    assert_trains_as_one_process("adamw", torch.float64, 1e-10, bias=starve)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_experts_may_be_fully_sharded_over_another_axis(rank):
    """Experts are sharded over two ranks each way, everything else over all four."""
    from torch.distributed.fsdp import fully_shard

    expected, model = mixtral().double(), mixtral().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    apply_expert_parallel(model, mesh["ep"])
    every = init_device_mesh("cpu", (4,))
    for block in model.model.layers:
        fully_shard(block.mlp.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=every)
    fully_shard(model, mesh=every)
    optimizers = [OPTIMIZERS["adamw"](one.parameters()) for one in (expected, model)]
    for step in range(3):
        batch = global_batch(step)
        next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch).backward()
        mine = batch.chunk(4)[rank]
        next_token_loss(model(input_ids=mine, use_cache=False).logits, mine).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert_states_equal(model, optimizers[1], expected, optimizers[0], 1e-10)


@pytest.mark.ranks(2)
def test_gradients_may_be_sums(rank):
    expected, model = mixtral().double(), mixtral().double()
    apply_expert_parallel(model, ep_mesh(), average=False)
    batch = global_batch(0)
    next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch).backward()
    mine = batch.chunk(2)[rank]
    next_token_loss(model(input_ids=mine, use_cache=False).logits, mine).backward()
    for ours, other in zip(model.model.layers, expected.model.layers, strict=True):
        assert distance(full(ours.mlp.experts.down_proj.grad) / 2, other.mlp.experts.down_proj.grad) < 1e-10


@pytest.mark.ranks(2)
def test_checkpointed_activations_exchange_tokens_again(rank):
    model, again = mixtral(), mixtral()
    for one in (model, again):
        apply_expert_parallel(one, ep_mesh())
    again.gradient_checkpointing_enable()
    for one in (model, again):
        next_token_loss(one(input_ids=tokens(rank), use_cache=False).logits, tokens(rank)).backward()
    for ours, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(other.grad))


@pytest.mark.ranks(2)
def test_router_loss_is_that_of_all_tokens(rank):
    """Its value on every rank, and the mean of its gradients over the ranks."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = [torch.randn(12, 4, generator=torch.Generator().manual_seed(layer)) for layer in range(2)]
    full_logits = [one.clone().requires_grad_() for one in logits]
    expected = load_balancing_loss_func(tuple(full_logits), 4, 2)
    expected.backward()
    mine = [one.chunk(2)[rank].clone().requires_grad_() for one in logits]
    loss = load_balancing_loss(mine, top_k=2, group=dist.group.WORLD)
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for ours, other in zip(mine, full_logits, strict=True):
        assert distance(ours.grad / 2, other.grad.chunk(2)[rank]) < 1e-5


@pytest.mark.ranks(2)
def test_router_loss_counts_the_tokens_of_ranks_with_padding(rank):
    """Ranks with different numbers of tokens, some of them masked."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
    full_logits = logits.clone().requires_grad_()
    expected = load_balancing_loss_func((full_logits,), 4, 2, mask)
    expected.backward()
    mine = logits.split([4, 8])[rank].clone().requires_grad_()
    held = mask.flatten().split([4, 8])[rank]
    loss = load_balancing_loss([mine], top_k=2, group=dist.group.WORLD, mask=held)
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert distance(mine.grad / 2, full_logits.grad.split([4, 8])[rank]) < 1e-5


@pytest.mark.ranks(2)
def test_a_model_returns_the_router_loss_of_all_ranks(rank):
    """Whether it is asked by its configuration or in the call; without it, nothing changes."""
    model, summed = (mixtral(router_aux_loss_coef=0.5) for _ in range(2))
    sum_router_loss(summed, None)
    mine = tokens(rank)
    asked = {"input_ids": mine, "labels": mine, "output_router_logits": True}
    every = torch.cat([tokens(0), tokens(1)])
    expected = model(input_ids=every, output_router_logits=True).aux_loss
    own, ours = model(**asked), summed(**asked)
    assert float(ours.aux_loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(ours.loss - own.loss) == pytest.approx(0.5 * float(expected - own.aux_loss), abs=1e-5)
    assert torch.equal(summed(input_ids=mine, labels=mine).loss, model(input_ids=mine, labels=mine).loss)
    summed.config.output_router_logits = True
    assert float(summed(input_ids=mine).aux_loss) == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(BackendError, match=r"without router_logits and aux_loss.*nearest: return_dict=True"):
        summed(**asked, return_dict=False)


def test_a_model_around_one_with_a_router_loss_is_a_warning(caplog):
    sum_router_loss(nn.Sequential(mixtral(output_router_logits=True)), None)
    assert "the load-balancing loss of Sequential is computed from each rank's own tokens" in caplog.text


@pytest.mark.ranks(2)
def test_experts_of_gpt_oss_with_biases(rank):
    """Their forward names its arguments otherwise."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    counts = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = GptOssConfig(**sizes, **counts, pad_token_id=0, eos_token_id=1, experts_implementation="eager")
        models.append(GptOssForCausalLM(config).double())
    expected, model = models
    apply_expert_parallel(model, ep_mesh())
    batch = global_batch(0)
    next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch).backward()
    mine = batch.chunk(2)[rank]
    next_token_loss(model(input_ids=mine, use_cache=False).logits, mine).backward()
    average_gradients(model)
    for (name, ours), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert distance(full(ours.grad), other.grad) < 1e-10, name


@pytest.mark.ranks(3)
def test_experts_that_do_not_divide_name_their_module(rank):
    with pytest.raises(PrepareError, match=r"layers.0.mlp.experts has 4 experts, which 3 .* nearest: 2 ranks"):
        apply_expert_parallel(mixtral(), ep_mesh())


@pytest.mark.ranks(2)
def test_models_without_experts_and_second_applications_are_refused(rank):
    with pytest.raises(PrepareError, match=r"LlamaForCausalLM has no module of experts"):
        apply_expert_parallel(llama(), ep_mesh())
    with pytest.raises(PrepareError, match=r"Linear has no module of experts"):
        apply_expert_parallel(nn.Linear(2, 2), ep_mesh())
    model = mixtral()
    apply_expert_parallel(model, ep_mesh())
    with pytest.raises(PrepareError, match=r"experts of model.layers.0.mlp.experts are DTensors already"):
        apply_expert_parallel(model, ep_mesh())
