"""A plan is derived where a block is known and divides, and says why where not."""

import pytest
from torch import nn

from accel_backends.parallel.derive import derive_plan
from accel_backends.parallel.plan import model_plan
from accel_backends.parallel.styles import STYLES, FusedColwise, LocalSizes
from accel_backends.parallel.tensor_parallel import check_tensor_parallel
from accel_state.errors import PrepareError
from accel_testing.equivalence.causal_lms import tiny_gpt2

from .tiny_models import llama, mixtral


def styles(plan):
    return {choice.pattern: choice.style for choice in plan.choices}


def test_llama_has_the_plan_that_transformers_gives_it():
    assert styles(derive_plan(llama(), 2)) == styles(model_plan(llama()))


def test_gpt2_has_fused_projections_and_a_tied_embedding():
    found = styles(derive_plan(tiny_gpt2(), 2))
    assert found["transformer.h.*.attn.c_attn"] == FusedColwise((32, 32, 32))
    assert found["transformer.wte"] == STYLES["embedding_rowwise"]
    assert found["lm_head"] == STYLES["colwise_gather_output"]


def test_heads_stay_entire():
    plan = derive_plan(llama(heads=2), 4)
    found = styles(plan)
    assert {found[f"model.layers.*.self_attn.{name}"] for name in ("q_proj", "o_proj")} == {STYLES["replicate"]}
    assert "4 ranks do not divide the 2 heads of k_proj" in str(plan)
    assert found["model.layers.*.mlp.gate_proj"] == STYLES["colwise"]


class Attention(nn.Module):
    """Projections of four heads, and whatever else is given."""

    def __init__(self, **others):
        super().__init__()
        self.head_dim = 4
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(16, 16))
        for name, other in others.items():
            setattr(self, name, other)


def test_parameters_of_all_heads_leave_an_attention_replicated():
    assert styles(derive_plan(Attention(q_norm=nn.RMSNorm(4)), 2))["q_norm"] == STYLES["replicated_with_grad_allreduce"]
    for other in (nn.RMSNorm(16), nn.Parameter(nn.Linear(4, 1).bias)):
        plan = derive_plan(Attention(extra=other), 2)
        assert set(styles(plan).values()) == {STYLES["replicate"]}
        assert "extra" in str(plan)


def test_an_attention_counts_its_own_heads():
    plan = derive_plan(Attention(num_heads=4, n_kv_head=4, num_other_heads=3, heads=[4]), 2)
    assert styles(plan)[""] == LocalSizes(("num_heads", "n_kv_head"))


def test_an_attention_joins_its_own_heads():
    plan = derive_plan(Attention(num_heads=4, embed_dim=16), 2)
    assert styles(plan)[""] == LocalSizes(("num_heads", "embed_dim"))
    narrow = Attention(num_heads=2, embed_dim=16, q_proj=nn.Linear(16, 8), o_proj=nn.Linear(8, 16))
    narrow.k_proj = narrow.v_proj = narrow.q_proj
    assert styles(derive_plan(narrow, 2))[""] == LocalSizes(("num_heads",))


def test_a_norm_between_the_layers_leaves_a_feed_forward_network_replicated():
    network = nn.Module()
    network.fc1, network.norm, network.fc2 = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    plan = derive_plan(network, 2)
    assert set(styles(plan).values()) == {STYLES["replicate"]}
    assert "norm may compute over all 8 features" in str(plan)


@pytest.mark.parametrize(
    "others", [{"act_fn": nn.PReLU()}, {"scale": nn.Parameter(nn.Linear(8, 1).weight[0])}], ids=["PReLU", "scale"]
)
def test_what_is_learnt_between_the_layers_leaves_a_feed_forward_network_replicated(others):
    network = nn.Module()
    network.fc1, network.fc2, network.layer_norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
    assert styles(derive_plan(network, 2))["fc1"] == STYLES["colwise"]
    for name, other in others.items():
        setattr(network, name, other)
    plan = derive_plan(network, 2)
    assert set(styles(plan).values()) == {STYLES["replicate"]}
    assert f"{next(iter(others))} may compute over all 8 features" in str(plan)


def test_heads_with_norms_of_their_own_leave_an_attention_replicated():
    norms = nn.ModuleList(nn.LayerNorm(4, bias=False) for _ in range(4))
    assert set(styles(derive_plan(Attention(q_layernorm=norms), 2)).values()) == {STYLES["replicate"]}


def test_a_fused_linear_layer_has_its_parts_in_another_order():
    network = nn.Module()
    network.split_size, network.num_heads = 8, 2
    network.c_attn, network.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
    assert derive_plan(network, 2).choices == ()


def test_experts_are_left_to_expert_parallelism():
    found = styles(derive_plan(mixtral(), 2))
    assert found["model.layers.*.self_attn.q_proj"] == STYLES["colwise"]
    assert not any("experts" in pattern for pattern in found)
    with pytest.raises(PrepareError, match=r"experts.gate_up_proj the style 'packed_colwise', which is not supported"):
        model_plan(mixtral())


def test_vocabularies_that_do_not_divide_are_replicated():
    plan = derive_plan(llama(), 3)
    assert styles(plan)["lm_head"] == STYLES["replicate"]
    assert "3 ranks do not divide a vocabulary of 64" in str(plan)


def test_a_head_whose_bias_or_weight_is_elsewhere_too_is_replicated():
    model = llama(tie=True)
    model.get_output_embeddings().bias = model.bias = nn.Parameter(model.lm_head.weight[:, 0].detach())
    plan = derive_plan(model, 2)
    assert styles(plan)["lm_head"] == STYLES["replicate"]
    assert "model.embed_tokens" not in styles(plan)
    check_tensor_parallel(model, 2, "derive")


def test_a_plan_that_replicates_everything_is_refused():
    with pytest.raises(PrepareError, match="every rank would compute all of it"):
        check_tensor_parallel(Attention(extra=nn.RMSNorm(16)), 2, "derive")


def test_sequential_needs_pointwise_modules_between():
    pointwise = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    assert styles(derive_plan(pointwise, 2)) == {"0": STYLES["colwise"], "2": STYLES["rowwise"]}
    assert derive_plan(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)), 2).choices == ()


def test_only_the_first_block_splits_sequences():
    found = styles(derive_plan(llama(), 2, sequence_parallel=True))
    assert found["model.layers.0"] == STYLES["split_sequence"]
    assert "model.layers.*" not in found
    assert found["model.layers.*.self_attn.o_proj"] == STYLES["rowwise_scatter_sequence"]
    assert found["model.norm"] == STYLES["sequence_parallel_gather_output"]


def test_sequence_parallelism_needs_blocks_of_sharded_modules_and_norms():
    with pytest.raises(PrepareError, match="has no list of two or more blocks"):
        derive_plan(nn.Linear(4, 4), 2, sequence_parallel=True)
    with pytest.raises(PrepareError, match="mlp is a MixtralSparseMoeBlock, which is neither a norm"):
        derive_plan(mixtral(), 2, sequence_parallel=True)
