"""Architectures of Transformers models that megatron-core's ``GPTModel`` computes, and their rules of conversion."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.nn import functional

from accel_megatron.conversion.rules import (
    Rule,
    attention,
    gated,
    gated_already,
    same,
    slice_name,
    stack_name,
    transposed,
)
from accel_state.errors import PrepareError


def gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh."""
    return functional.gelu(hidden, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}
_EMBEDDING, _POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_HEAD, _LAYERS, _NORM = "output_layer.weight", "decoder.layers", "decoder.final_layernorm"


@final
@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as megatron-core needs to know it.

    Attributes:
        transformer: fields of ``TransformerConfig``.
        model: arguments of ``GPTModel``.
        num_layers: number of transformer layers.
        divisible: numbers that the tensor-parallel size has to divide, by their names in the model's configuration.
        layer_rules: rules of layer ``number``, by the names of megatron-core within the layer.
        first: rules of what stands before the layers.
        last: rules of what stands behind the layers; the head is among them if it is not tied.
        head: rule of the head, which a last stage has even if it is tied.
        tied: whether the head is the embedding.
        rotary: whether positions are rotary, not learned.
        num_experts: number of experts in each layer; 0: layers have none.
        expert_rules: rules of expert ``number`` of a layer, by the names of megatron-core within the expert.
    """

    transformer: Mapping[str, Any]
    model: Mapping[str, Any]
    num_layers: int
    divisible: Mapping[str, int]
    layer_rules: Callable[[int], dict[str, Rule]]
    first: Mapping[str, Rule]
    last: Mapping[str, Rule]
    head: Rule
    tied: bool
    rotary: bool = True
    num_experts: int = 0
    expert_rules: Callable[[int, int], dict[str, Rule]] = lambda layer, number: {}

    def check_degrees(self, tensor: int, pipeline: int, expert: int = 1) -> None:
        """Raises PrepareError for degrees that do not divide the model."""
        if expert > 1 and not self.num_experts:
            raise PrepareError(
                f"expert_model_parallel_size={expert}, and the layers of the model have no experts; nearest: 1"
            )
        if self.num_experts and tensor > 1:
            raise PrepareError(
                f"tp_degree={tensor} with a mixture of experts: megatron-core then splits experts, too, which was not "
                f"shown to be right; nearest: tp_degree=1, expert_model_parallel_size={tensor}"
            )
        if self.num_experts % expert:
            raise PrepareError(
                f"{self.num_experts} experts are not divisible by expert_model_parallel_size={expert}; nearest: "
                f"{_nearest(self.num_experts, expert)}"
            )
        for name, number in self.divisible.items():
            if number % tensor:
                more = f"; resize_token_embeddings(pad_to_multiple_of={tensor})" if name == "vocab_size" else ""
                raise PrepareError(
                    f"{name}={number} is not divisible by tp_degree={tensor}; nearest: {_nearest(number, tensor)}{more}"
                )
        if self.num_layers % pipeline:
            raise PrepareError(
                f"{self.num_layers} layers are not divisible by pp_degree={pipeline}; nearest: "
                f"{_nearest(self.num_layers, pipeline)}"
            )

    @property
    def stacks(self) -> frozenset[str]:
        """FQNs of tensors that stack the weights of all experts of a layer."""
        layers = range(self.num_layers) if self.num_experts else ()
        found = (rule for layer in layers for rule in self.expert_rules(layer, 0).values())
        return frozenset(stack_name(name) for rule in found for name in rule.names)

    def rules(
        self, stage: int, pipeline: int, expert_rank: int = 0, expert_size: int = 1
    ) -> Iterator[tuple[str, Rule]]:
        """Yields the name in megatron-core's model of a stage, and the rule, of each of its tensors.

        Of the experts of a layer, those of rank ``expert_rank`` of ``expert_size`` expert-parallel ranks are among
        them; their FQNs are ``slice_name`` of stacked tensors.
        """
        per_stage, per_rank = self.num_layers // pipeline, self.num_experts // expert_size
        if stage == 0:
            yield from self.first.items()
        for local in range(per_stage):
            for name, rule in self.layer_rules(stage * per_stage + local).items():
                yield f"{_LAYERS}.{local}.{name}", rule
            for own in range(per_rank):
                expert = self.expert_rules(stage * per_stage + local, expert_rank * per_rank + own)
                for name, rule in expert.items():
                    yield f"{_LAYERS}.{local}.mlp.experts.local_experts.{own}.{name}", rule
        if stage == pipeline - 1:
            yield from self.last.items()
            if not self.tied or pipeline > 1:
                yield _HEAD, self.head

    def owned_rules(
        self, stage: int, pipeline: int, expert_rank: int = 0, expert_size: int = 1
    ) -> Iterator[tuple[str, Rule]]:
        """Yields as ``rules``, without the copy of a tied embedding on the last stage."""
        for name, rule in self.rules(stage, pipeline, expert_rank, expert_size):
            if not (name == _HEAD and self.tied):
                yield name, rule


def architecture_of(config: Any) -> Architecture:
    """Returns the architecture of a model with this Transformers configuration.

    Raises:
        PrepareError: a model that is no Llama, Mixtral or GPT-2, or an option that megatron-core computes otherwise.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in _KINDS:
        raise PrepareError(
            f"Megatron-LM trains models of Transformers with model_type {', '.join(map(repr, _KINDS))}, and this one "
            f"is {kind!r}; nearest: strategy='fsdp'"
        )
    return _KINDS[kind](config)


def _llama(config: Any) -> Architecture:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    for name, found, wanted in (
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("attention_bias", getattr(config, "attention_bias", False), False),
        ("mlp_bias", getattr(config, "mlp_bias", False), False),
        ("hidden_act", config.hidden_act, "silu"),
    ):
        _refuse(name, found, wanted)
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
        first={_EMBEDDING: same(f"{prefix}.embed_tokens.weight", 0)},
        last={f"{_NORM}.weight": same(f"{prefix}.norm.weight")},
        head=same(f"{prefix}.embed_tokens.weight" if tied else "lm_head.weight", 0),
        tied=tied,
    )


def _mixtral(config: Any) -> Architecture:
    for name, wanted in (("sliding_window", None), ("router_jitter_noise", 0.0), ("output_router_logits", False)):
        _refuse(name, getattr(config, name), wanted)
    dense = _llama(config)

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
        expert_rules=expert,
    )


def _gpt2(config: Any) -> Architecture:
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False),
    ):
        _refuse(name, getattr(config, name), wanted)
    if config.activation_function not in _ACTIVATIONS:
        raise PrepareError(
            f"activation_function={config.activation_function!r}; expected one of {', '.join(sorted(_ACTIVATIONS))}"
        )
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
            "activation_func": _ACTIVATIONS[config.activation_function],
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
        first={_EMBEDDING: same(f"{prefix}.wte.weight", 0), _POSITIONS: same(f"{prefix}.wpe.weight")},
        last={f"{_NORM}.weight": same(f"{prefix}.ln_f.weight"), f"{_NORM}.bias": same(f"{prefix}.ln_f.bias")},
        head=same(f"{prefix}.wte.weight" if tied else "lm_head.weight", 0),
        tied=tied,
        rotary=False,
    )


_KINDS: Mapping[str, Callable[[Any], Architecture]] = {"llama": _llama, "mixtral": _mixtral, "gpt2": _gpt2}


def _refuse(name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise PrepareError(f"{name}={found!r}, which megatron-core does not compute; nearest: {name}={wanted!r}")


def _nearest(number: int, degree: int) -> int:
    return max(one for one in range(1, degree + 1) if number % one == 0)
