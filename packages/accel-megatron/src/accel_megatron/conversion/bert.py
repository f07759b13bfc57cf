"""BERT as megatron-core's ``BertModel``: Megatron-LM's own layers, and those of the original."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from accel_megatron.conversion.architecture import EMBEDDING, POSITIONS, Architecture, activation, refuse
from accel_megatron.conversion.rules import Rule, attention, same

_PREDICTIONS = "cls.predictions"
_SENTENCES = ("cls.seq_relationship.", "binary_head.")


def megatron_bert(config: Any, names: Collection[str] = ()) -> Architecture:
    """Returns the architecture of a BERT that normalises the inputs of its layers, as Megatron-LM's does.

    ``names``: names of its tensors, which tell whether it has the head that classifies pairs of sentences.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """

    def norms(here: str) -> dict[str, str]:
        return {"input_layernorm": f"{here}.attention.ln", "pre_mlp_layernorm": f"{here}.ln"}

    return _architecture(config, names, norms, {"encoder.final_layernorm": "bert.encoder.ln"}, {}, after=False)


def bert(config: Any, names: Collection[str] = ()) -> Architecture:
    """Returns the architecture of a BERT that normalises the sums behind its layers' parts, as the original does.

    ``names``: names of its tensors, which tell whether it has the head that classifies pairs of sentences.

    Raises:
        PrepareError: an option that megatron-core computes otherwise.
    """

    def norms(here: str) -> dict[str, str]:
        return {"self_attn_bda.norm": f"{here}.attention.output.LayerNorm", "mlp_bda.norm": f"{here}.output.LayerNorm"}

    before = {"embedding.embedding_dropout.0": "bert.embeddings.LayerNorm"}
    return _architecture(config, names, norms, {}, before, after=True)


def _architecture(
    config: Any,
    names: Collection[str],
    norms: Callable[[str], Mapping[str, str]],
    last_norm: Mapping[str, str],
    first_norm: Mapping[str, str],
    *,
    after: bool,
) -> Architecture:
    for name, wanted in (("is_decoder", False), ("add_cross_attention", False), ("tie_word_embeddings", True)):
        refuse(name, getattr(config, name), wanted)
    heads = config.num_attention_heads
    sentences = any(name.startswith(_SENTENCES) for name in names)

    def layer(number: int) -> dict[str, Rule]:
        here = f"bert.encoder.layer.{number}"
        rules = _linear("self_attention.linear_proj", f"{here}.attention.output.dense", 1)
        rules |= _linear("mlp.linear_fc1", f"{here}.intermediate.dense", 0)
        rules |= _linear("mlp.linear_fc2", f"{here}.output.dense", 1)
        for kind in ("weight", "bias"):
            projections = [f"{here}.attention.self.{one}.{kind}" for one in ("query", "key", "value")]
            rules[f"self_attention.linear_qkv.{kind}"] = attention(projections, heads, heads)
        return rules | _both(norms(here))

    head = {
        "lm_head.dense": f"{_PREDICTIONS}.transform.dense",
        "lm_head.layer_norm": f"{_PREDICTIONS}.transform.LayerNorm",
    }
    if sentences:
        head |= {"binary_head": "cls.seq_relationship", "pooler.dense": "bert.pooler.dense"}
    embeddings = "bert.embeddings"
    function = activation("hidden_act", config.hidden_act)
    return Architecture(
        transformer={
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "num_attention_heads": heads,
            "layernorm_epsilon": config.layer_norm_eps,
            "activation_func": function,
            "hidden_dropout": config.hidden_dropout_prob,
            "attention_dropout": config.attention_probs_dropout_prob,
        },
        model={
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.max_position_embeddings,
            "num_tokentypes": config.type_vocab_size,
            "share_embeddings_and_output_weights": True,
            "add_binary_head": sentences,
        },
        num_layers=config.num_hidden_layers,
        divisible={
            "num_attention_heads": heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        layer_rules=layer,
        first={
            EMBEDDING: same(f"{embeddings}.word_embeddings.weight", 0),
            POSITIONS: same(f"{embeddings}.position_embeddings.weight"),
            "embedding.tokentype_embeddings.weight": same(f"{embeddings}.token_type_embeddings.weight"),
            **_both(first_norm),
        },
        last={**_both(last_norm), **_both(head), "output_layer.bias": same(f"{_PREDICTIONS}.bias", 0)},
        head=same(f"{embeddings}.word_embeddings.weight", 0),
        tied=True,
        rotary=False,
        family="bert",
        layers="encoder.layers",
        details={"norms_after": after},
        padding=config.pad_token_id,
    )


def _linear(name: str, source: str, dim: int) -> dict[str, Rule]:
    """Returns the rules of a linear layer whose weight is split along ``dim``."""
    return {f"{name}.weight": same(f"{source}.weight", dim), f"{name}.bias": same(f"{source}.bias", None if dim else 0)}


def _both(modules: Mapping[str, str]) -> dict[str, Rule]:
    """Returns the rules of weights and biases that every tensor-parallel rank has."""
    return {
        f"{name}.{kind}": same(f"{source}.{kind}") for name, source in modules.items() for kind in ("weight", "bias")
    }
