"""Llama, Mixtral and GPT-2 as megatron-core's ``GPTModel``."""

from dataclasses import replace
from typing import Any

from torch.nn import functional

from accel_megatron.conversion.architecture import EMBEDDING, POSITIONS, Architecture, activation, refuse
from accel_megatron.conversion.rules import Rule, attention, gated, gated_already, same, slice_name, transposed
from accel_state.errors import PrepareError

_NORM = "decoder.final_layernorm"


def llama(config: Any) -> Architecture:
    """Returns the architecture of a Llama.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    for name, found, wanted in (
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("attention_bias", getattr(config, "attention_bias", False), False),
        ("mlp_bias", getattr(config, "mlp_bias", False), False),
        ("hidden_act", config.hidden_act, "silu"),
    ):
        refuse(name, found, wanted)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    prefix = "model"

    def layer(number: int) -> dict[str, Rule]:
        here = f"{prefix}.layers.{number}"
        projections = [f"{here}.self_attn.{one}_proj.weight" for one in "qkv"]
        return {
            "input_layernorm.weight": same(f"{here}.input_layernorm.weight"),
            "self_attention.linear_qkv.weight": attention(projections, heads, groups),
            "self_attention.linear_proj.weight": same(f"{here}.self_attn.o_proj.weight", 1),
            "pre_mlp_layernorm.weight": same(f"{here}.post_attention_layernorm.weight"),
            "mlp.linear_fc1.weight": gated(f"{here}.mlp.gate_proj.weight", f"{here}.mlp.up_proj.weight"),
            "mlp.linear_fc2.weight": same(f"{here}.mlp.down_proj.weight", 1),
        }

    tied = bool(config.tie_word_embeddings)
    return Architecture(
        transformer={
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "layernorm_epsilon": config.rms_norm_eps,
            "normalization": "RMSNorm",
            "activation_func": functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": config.attention_dropout,
        },
        model={
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": rope.get("rope_theta", 10000.0),
            "share_embeddings_and_output_weights": tied,
        },
        num_layers=config.num_hidden_layers,
        divisible={
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        layer_rules=layer,
        first={EMBEDDING: same(f"{prefix}.embed_tokens.weight", 0)},
        last={f"{_NORM}.weight": same(f"{prefix}.norm.weight")},
        head=same(f"{prefix}.embed_tokens.weight" if tied else "lm_head.weight", 0),
        tied=tied,
        padding=config.pad_token_id,
    )


def mixtral(config: Any) -> Architecture:
    """Returns the architecture of a Mixtral.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """
    for name, wanted in (("sliding_window", None), ("router_jitter_noise", 0.0), ("output_router_logits", False)):
        refuse(name, getattr(config, name), wanted)
    dense = llama(config)

    def layer(number: int) -> dict[str, Rule]:
        own = {name: rule for name, rule in dense.layer_rules(number).items() if not name.startswith("mlp.")}
        return own | {"mlp.router.weight": same(f"model.layers.{number}.mlp.gate.weight")}

    def expert(layer: int, number: int) -> dict[str, Rule]:
        here = f"model.layers.{layer}.mlp.experts"
        return {
            "linear_fc1.weight": gated_already(slice_name(f"{here}.gate_up_proj", number)),
            "linear_fc2.weight": same(slice_name(f"{here}.down_proj", number), 1),
        }

    mixture = {
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,  # needs Transformer Engine or grouped_gemm
    }
    return replace(
        dense,
        transformer={**dense.transformer, **mixture},
        layer_rules=layer,
        num_experts=config.num_local_experts,
        divisible={name: number for name, number in dense.divisible.items() if name != "intermediate_size"},
        divisible_experts={"intermediate_size": config.intermediate_size},
        expert_rules=expert,
        in_fp32="megatron-core and Transformers choose experts in fp32",
    )


def gpt2(config: Any) -> Architecture:
    """Returns the architecture of a GPT-2.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False),
    ):
        refuse(name, getattr(config, name), wanted)
    if config.embd_pdrop != config.resid_pdrop:
        raise PrepareError(
            f"embd_pdrop={config.embd_pdrop} and resid_pdrop={config.resid_pdrop}: megatron-core has one hidden_dropout"
            "; make them equal"
        )
    heads, prefix = config.n_head, "transformer"

    def layer(number: int) -> dict[str, Rule]:
        here = f"{prefix}.h.{number}"
        return {
            "input_layernorm.weight": same(f"{here}.ln_1.weight"),
            "input_layernorm.bias": same(f"{here}.ln_1.bias"),
            "self_attention.linear_qkv.weight": attention([f"{here}.attn.c_attn.weight"], heads, heads, conv=True),
            "self_attention.linear_qkv.bias": attention([f"{here}.attn.c_attn.bias"], heads, heads),
            "self_attention.linear_proj.weight": transposed(f"{here}.attn.c_proj.weight", 1),
            "self_attention.linear_proj.bias": same(f"{here}.attn.c_proj.bias"),
            "pre_mlp_layernorm.weight": same(f"{here}.ln_2.weight"),
            "pre_mlp_layernorm.bias": same(f"{here}.ln_2.bias"),
            "mlp.linear_fc1.weight": transposed(f"{here}.mlp.c_fc.weight", 0),
            "mlp.linear_fc1.bias": same(f"{here}.mlp.c_fc.bias", 0),
            "mlp.linear_fc2.weight": transposed(f"{here}.mlp.c_proj.weight", 1),
            "mlp.linear_fc2.bias": same(f"{here}.mlp.c_proj.bias"),
        }

    tied = bool(config.tie_word_embeddings)
    inner = config.n_inner or 4 * config.n_embd
    return Architecture(
        transformer={
            "num_layers": config.n_layer,
            "hidden_size": config.n_embd,
            "ffn_hidden_size": inner,
            "num_attention_heads": heads,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "activation_func": activation("activation_function", config.activation_function),
            "hidden_dropout": config.resid_pdrop,
            "attention_dropout": config.attn_pdrop,
        },
        model={
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.n_positions,
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": tied,
        },
        num_layers=config.n_layer,
        divisible={"n_head": heads, "n_inner": inner, "vocab_size": config.vocab_size},
        layer_rules=layer,
        first={EMBEDDING: same(f"{prefix}.wte.weight", 0), POSITIONS: same(f"{prefix}.wpe.weight")},
        last={f"{_NORM}.weight": same(f"{prefix}.ln_f.weight"), f"{_NORM}.bias": same(f"{prefix}.ln_f.bias")},
        head=same(f"{prefix}.wte.weight" if tied else "lm_head.weight", 0),
        tied=tied,
        rotary=False,
    )
