"""Tiny causal language models of transformers with seeded weights, and their loss in the dtype of the logits."""

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
