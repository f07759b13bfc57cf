"""Exchange of heads for tokens: attention over full sequences, exact for every number of heads and with padding."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel_backends.parallel.attention.exchanged import gathered_padding, nearest_degree, visible
from accel_backends.parallel.context_parallel import Context
from accel_state.errors import BackendError, PrepareError


def context(length=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    return Context(mesh, "ulysses", length=length)


def distance(found, expected):
    return float((found - expected).abs().max())


def random(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("heads", "of_keys"), [(8, 8), (8, 4), (8, 2), (8, 1), (12, 6), (12, 3)])
@pytest.mark.sampled(2)
def test_heads_of_keys_may_be_fewer_than_the_ranks(rank, heads, of_keys):
    sp = context()
    q, k, v = (random(2, n, 8, 4, seed=n) for n in (heads, of_keys, of_keys))
    inputs = [one.clone().requires_grad_() for one in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    expected.square().sum().backward()
    local = [sp.shard(one, 2).requires_grad_() for one in (q, k, v)]
    output = sp.attention(*local, causal=True)
    output.square().sum().backward()
    assert distance(output, sp.shard(expected, 2)) < 1e-12
    for found, wanted in zip(local, inputs, strict=True):
        assert distance(found.grad, sp.shard(wanted.grad, 2)) < 1e-12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("causal", [True, False])
def test_no_query_sees_padding(rank, causal):
    sp = context()
    q, k, v = (random(2, heads, 8, 4, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[0, :3], padding[1, 6:] = 0, 0
    mask = padding.bool()[:, None, None, :]
    mask = mask & torch.ones(8, 8, dtype=torch.bool).tril() if causal else mask
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for given in (padding, visible(padding, causal=causal)):
        output = sp.attention(*(sp.shard(one, 2) for one in (q, k, v)), causal=causal, padding=given)
        assert distance(output, sp.shard(expected, 2)) < 1e-12
    wrong = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(BackendError, match=r"with a mask of shape \(2, 1, 4, 4\); expected none, .* \(batch, 8\)"):
        sp.attention(*(sp.shard(one, 2) for one in (q, k, v)), causal=causal, padding=wrong)


@pytest.mark.ranks(2)
def test_the_exchange_is_differentiable_twice(rank):
    sp = context()
    q, k, v = (random(1, 2, 4, 2, seed=seed) for seed in range(3))

    def second(attention, values):
        values = values.clone().requires_grad_()
        first = torch.autograd.grad(attention(values).square().sum(), values, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), values)[0]

    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        found = second(lambda x: sp.attention(sp.shard(q, 2), sp.shard(k, 2), x, causal=True), sp.shard(v, 2))
        wanted = second(lambda x: F.scaled_dot_product_attention(q, k, x, is_causal=True), v)
    assert distance(found, sp.shard(wanted, 2)) < 1e-12


@pytest.mark.ranks(2)
def test_batches_and_heads_that_do_not_fit_are_refused(rank):
    sp = context(length=16)
    odd = torch.zeros(1, 3, 4, 2)
    with pytest.raises(BackendError, match=r"3 heads of queries do not divide among 2 .*nearest: sp_size=1"):
        sp.attention(odd, odd, odd, causal=True)
    ids = torch.arange(32).view(2, 16)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    shard = sp.shard_batch({"input_ids": ids, "attention_mask": mask})
    assert torch.equal(shard["attention_mask"], mask.chunk(2, 1)[rank])
    assert torch.equal(gathered_padding(shard["attention_mask"], sp.group), mask.bool())
    assert torch.equal(shard["position_ids"], torch.arange(8).expand(2, 8) + 8 * rank)
    with pytest.raises(PrepareError, match=r"attention_mask of shape \(2, 1, 16, 16\); expected \(batch, 16\)"):
        sp.shard_batch({"input_ids": ids, "attention_mask": torch.zeros(2, 1, 16, 16)})
    with pytest.raises(PrepareError, match=r"across whose boundaries sequence-parallel attention would look"):
        sp.shard_batch({"input_ids": ids, "position_ids": torch.arange(16).remainder(8).expand(2, 16)})
    with pytest.raises(PrepareError, match=r"sequences of 14 tokens, and sp_seq_length says that all have 16"):
        sp.shard_batch({"input_ids": ids[:, :14]})


def test_the_nearest_degree_divides_the_heads():
    assert [nearest_degree(6, size) for size in (1, 2, 4, 5, 8)] == [1, 2, 3, 3, 6]
