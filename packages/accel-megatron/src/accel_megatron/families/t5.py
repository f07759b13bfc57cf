"""Encoders with a decoder: megatron-core's ``T5Model``."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, final

import torch
from torch import nn

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.context import ContextRanks
from accel_megatron.families.family import IGNORED, Family, Term, TokenBatch, layers_of
from accel_megatron.families.norm import MarkedNorm
from accel_state.errors import BackendError


@final
class T5Family(Family):
    """T5 of versions 1.0 and 1.1."""

    outputs = "modeling_outputs.Seq2SeqLMOutput"

    def build(
        self, config: Any, architecture: Architecture, *, first: bool, last: bool, num_layers: int, chunk: int | None
    ) -> Any:
        """Returns a ``T5Model``; there is one stage only."""
        from megatron.core.models.T5.t5_model import T5Model
        from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec

        details = architecture.details
        encoder, decoder = encoder_model_with_local_spec(), decoder_model_with_local_spec()
        for layer in (encoder, decoder):
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = MarkedNorm
            parts.self_attention.submodules.core_attention = BiasedAttention
        decoder.submodules.pre_cross_attn_layernorm = MarkedNorm
        decoder.submodules.cross_attention.submodules.core_attention = BiasedAttention
        of_encoder = copy(config)
        of_encoder.num_layers = details["encoder_layers"]
        model: Any = T5Model(
            config=config,
            encoder_config=of_encoder,
            transformer_encoder_layer_spec=layers_of(encoder, details["encoder_layers"], MarkedNorm),
            transformer_decoder_layer_spec=layers_of(decoder, num_layers, MarkedNorm),
            pre_process=first,
            post_process=last,
            **architecture.model,
        )
        model.lm_head.output_layer.bias = None  # T5 has none
        ranks = ContextRanks.of(config)
        if ranks is not None:
            for positions in (model.encoder_relative_pos_emb, model.decoder_relative_pos_emb):
                positions.forward = partial(_bias, positions.forward, ranks)
        scale = details["output_scale"]
        if scale != 1.0:
            model.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * scale, *given[1:]))
        return model

    def batch(
        self,
        architecture: Architecture,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> TokenBatch:
        """Returns the batch; without ``decoder_input_ids``, the decoder reads the labels, shifted by one token.

        Raises:
            BackendError: neither ``labels`` nor ``decoder_input_ids``.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise BackendError("a T5 needs labels or decoder_input_ids")
            details = architecture.details
            decoder_input_ids = torch.full_like(labels, details["start"])
            decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, details["padding"])
        samples, length = decoder_input_ids.shape
        known = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = (known == 0)[:, None, None, :]
        later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1).expand(samples, 1, -1, -1)
        if decoder_attention_mask is not None:
            later = later | (decoder_attention_mask == 0)[:, None, None, :]
        tensors = {"ids": input_ids, "decoder_ids": decoder_input_ids, "hidden": hidden, "later": later}
        return TokenBatch(tensors, () if labels is None else (Term(labels),), (input_ids.shape[1], length))

    def call(self, model: Any, part: TokenBatch, *, labelled: bool) -> Any:
        """Returns the losses of all tokens of the decoder, or their logits."""
        given = part.tensors
        labels = {"lm_labels": part.terms[0].targets.clamp(min=0)} if labelled else {}
        masks = given["hidden"], given["later"], given["hidden"]
        return model(given["ids"], given["decoder_ids"], *masks, **labels)

    def result(self, architecture: Architecture, loss: torch.Tensor | None, logits: Sequence[torch.Tensor]) -> Any:
        """Returns the loss, and the logits of all tokens of the decoder."""
        from transformers.modeling_outputs import Seq2SeqLMOutput

        return Seq2SeqLMOutput(loss=loss, logits=next(iter(logits), None))


@final
class BiasedAttention(nn.Module):
    """Attention of a T5: scores are not scaled, and positions add a bias to them.

    megatron-core's own attention takes no bias without Transformer Engine.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Returns what all heads of this rank read, [queries, samples, heads * size].

        ``query``, ``key`` and ``value``: [tokens of this rank, samples, heads, size]. ``attention_mask``: True where a
        query does not read a key, and ``attention_bias``: both broadcast to [samples, heads, queries, keys of full
        sequences].
        """
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        ranks = ContextRanks.of(self.config)
        if ranks is not None:
            key, value = ranks.full_keys(key, value)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key)
        if self.config.attention_softmax_in_fp32:
            scores = scores.float()
        if attention_bias is not None:
            scores = scores + attention_bias
        weights = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min).softmax(-1).to(query.dtype)
        if self.config.sequence_parallel:
            weights = self.dropout(weights)
        else:
            with get_cuda_rng_tracker().fork():
                weights = self.dropout(weights)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2).contiguous()


def _bias(forward: Callable[[int, int], torch.Tensor], ranks: ContextRanks, queries: int, keys: int) -> torch.Tensor:
    """Returns the bias of this rank's queries, [1, heads, queries, keys]; numbers of tokens are those of this rank."""
    full = forward(queries * ranks.size, keys * ranks.size)
    return full.index_select(2, ranks.positions(full.shape[2], full.device))
