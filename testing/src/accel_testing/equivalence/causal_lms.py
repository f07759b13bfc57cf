"""Tiny causal language models of transformers with seeded weights; losses and layers in the dtype of their input."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def tiny_llama(**options: Any) -> nn.Module:
    """Llama of two blocks with four heads; ``options`` are those of ``LlamaConfig``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **options}))


def tiny_gpt2(**options: Any) -> nn.Module:
    """GPT-2 of two blocks without dropout, whose embedding is its head; ``options`` are those of ``GPT2Config``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropouts, **options}))


def tiny_mixtral(**options: Any) -> nn.Module:
    """Mixtral of two blocks, four experts and two choices; ``options`` are those of ``MixtralConfig``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    # The default implementation of experts has no kernel for float64.
    experts = {"num_local_experts": 4, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**{**_SIZES, **experts, **options}))


def with_exact_loss(model: Any) -> nn.Module:
    """The model with ``next_token_loss`` as its loss, where transformers computes losses in float32."""
    model.loss_function = next_token_loss
    exact: nn.Module = model
    return exact


def with_exact_layers(model: nn.Module) -> nn.Module:
    """The model with norms and routers that compute in the dtype of their input.

    Those of transformers compute in float32, to which they round activations and gradients. Numbers that differ by the
    rounding of float64 may be rounded apart, which is a difference of about 1e-9, and gradients of losses with weights
    are rounded at another scale than in one process, which is one of about 1e-8.
    """
    for module in model.modules():
        for name, forward in (("RMSNorm", _normed), ("TopKRouter", _routed)):
            if type(module).__name__.endswith(name):
                module.forward = MethodType(forward, module)
    return model


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    scaled: Tensor = norm.weight * (hidden * scale)
    return scaled


def _routed(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden.flatten(0, -2), router.weight)
    values, choices = logits.softmax(-1).topk(router.top_k, dim=-1)
    return logits, values / values.sum(-1, keepdim=True), choices


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Mean over the tokens with a label, or their sum divided by ``num_items_in_batch``, as transformers calls it."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return total / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
