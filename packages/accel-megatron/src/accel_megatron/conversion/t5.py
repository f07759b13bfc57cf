"""T5 as megatron-core's ``T5Model``."""

from typing import Any

from accel_megatron.conversion.architecture import EMBEDDING, Architecture, activation
from accel_megatron.conversion.rules import Rule, attention, gated, same

_BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"


def t5(config: Any) -> Architecture:
    """Returns the architecture of a T5, of version 1.0 or 1.1.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """
    heads = config.num_heads

    def layer(stack: str, number: int) -> dict[str, Rule]:
        here = f"{stack}.block.{number}.layer"
        own, cross = f"{here}.0.SelfAttention", f"{here}.1.EncDecAttention"
        rules = {
            "input_layernorm.weight": same(f"{here}.0.layer_norm.weight"),
            "self_attention.linear_qkv.weight": attention([f"{own}.{one}.weight" for one in "qkv"], heads, heads),
            "self_attention.linear_proj.weight": same(f"{own}.o.weight", 1),
        }
        if stack == "encoder":
            return rules | _feed_forward(f"{here}.1", gate=config.is_gated_act)
        rules |= {
            "pre_cross_attn_layernorm.weight": same(f"{here}.1.layer_norm.weight"),
            "cross_attention.linear_q.weight": same(f"{cross}.q.weight", 0),
            "cross_attention.linear_kv.weight": attention([f"{cross}.{one}.weight" for one in "kv"], 0, heads),
            "cross_attention.linear_proj.weight": same(f"{cross}.o.weight", 1),
        }
        return rules | _feed_forward(f"{here}.2", gate=config.is_gated_act)

    encoder = {
        f"encoder.layers.{number}.{name}": rule
        for number in range(config.num_layers)
        for name, rule in layer("encoder", number).items()
    }
    biases = {f"{one}_relative_pos_emb.relative_attention_bias.weight": one for one in ("encoder", "decoder")}
    return Architecture(
        transformer={
            "num_layers": config.num_decoder_layers,
            "hidden_size": config.d_model,
            "ffn_hidden_size": config.d_ff,
            "num_attention_heads": heads,
            "kv_channels": config.d_kv,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "normalization": "RMSNorm",
            "activation_func": activation("feed_forward_proj", config.dense_act_fn),
            "gated_linear_unit": config.is_gated_act,
            "add_bias_linear": False,
            # Transformers has dropout in two more places.
            **(dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0) if config.dropout_rate == 0 else {}),
        },
        model={
            "vocab_size": config.vocab_size,
            "max_sequence_length": 0,  # positions are relative
            "position_embedding_type": "relative",
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
            "share_embeddings_and_output_weights": True,
        },
        num_layers=config.num_decoder_layers,
        divisible={"num_heads": heads, "d_ff": config.d_ff, "vocab_size": config.vocab_size},
        layer_rules=lambda number: layer("decoder", number),
        first={
            EMBEDDING: same("shared.weight", 0),
            **{name: same(f"{stack}.block.0.{_BIAS}") for name, stack in biases.items()},
            **encoder,
        },
        last={
            f"{stack}.final_layernorm.weight": same(f"{stack}.final_layer_norm.weight")
            for stack in ("encoder", "decoder")
        },
        head=same("shared.weight", 0),
        tied=True,
        rotary=False,
        family="t5",
        details={
            "encoder_layers": config.num_layers,
            "output_scale": config.d_model**-0.5 if config.scale_decoder_outputs else 1.0,
            "start": config.decoder_start_token_id,
            "padding": config.pad_token_id,
        },
        in_fp32="Transformers computes norms and attention of a T5 in fp32, so that there is nothing to equal",
        undivided="the schedules of megatron-core 0.16.1 pass one tensor from stage to stage, and a decoder needs the "
        "encoder's output beside its own",
    )


def _feed_forward(here: str, *, gate: bool) -> dict[str, Rule]:
    dense = f"{here}.DenseReluDense"
    return {
        "pre_mlp_layernorm.weight": same(f"{here}.layer_norm.weight"),
        "mlp.linear_fc1.weight": (
            gated(f"{dense}.wi_0.weight", f"{dense}.wi_1.weight") if gate else same(f"{dense}.wi.weight", 0)
        ),
        "mlp.linear_fc2.weight": same(f"{dense}.wo.weight", 1),
    }
