"""Masked language models: megatron-core's ``BertModel``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.context import ContextRanks, use_context_attention
from accel_megatron.families.family import IGNORED, Family, Term, TokenBatch, layers_of
from accel_megatron.families.norm import MarkedNorm
from accel_megatron.private import norm_of_bert_heads
from accel_precision.convert import accumulation_dtype
from accel_state.errors import BackendError


@final
class BertFamily(Family):
    """BERT with its head of words, and perhaps the one that classifies pairs of sentences."""

    def build(
        self, config: Any, architecture: Architecture, *, first: bool, last: bool, num_layers: int, chunk: int | None
    ) -> Any:
        """Returns a ``BertModel`` of one stage, or of a chunk of it."""
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        after = architecture.details["norms_after"]
        layer = _layer(config, after=after)
        block = layers_of(layer, num_layers, None if after else MarkedNorm)
        block.submodules = bert_layer_local_spec.submodules  # BertModel looks there for an attention that it knows
        with norm_of_bert_heads(MarkedNorm):
            model: Any = BertModel(
                config=config,
                transformer_layer_spec=block,
                pre_process=first,
                post_process=last,
                vp_stage=chunk,
                **architecture.model,
            )
        model.bert_extended_attention_mask = _mask
        ranks = ContextRanks.of(config)
        if ranks is not None:
            model.bert_position_ids = partial(_positions, ranks, architecture.model["max_sequence_length"])
        if last:
            model.lm_head.gelu = config.activation_func
        if first and after:
            norm = MarkedNorm(config, config.hidden_size, config.layernorm_epsilon)
            model.embedding.embedding_dropout = nn.Sequential(norm, model.embedding.embedding_dropout)
        return model

    def batch(
        self,
        architecture: Architecture,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
    ) -> TokenBatch:
        """Returns the batch.

        Raises:
            BackendError: ``labels`` without ``next_sentence_label`` where the model has the head that it is for, or the
                contrary.
        """
        sentences = architecture.model["add_binary_head"]
        if (labels is not None and sentences) != (next_sentence_label is not None):
            raise BackendError(
                "next_sentence_label belongs to labels of a BERT with the head of pairs of sentences (ForPreTraining), "
                f"and this one has {'that' if sentences else 'no such'} head; nearest: "
                f"{'give both labels' if sentences else 'leave next_sentence_label out'}"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        given = (labels, next_sentence_label)
        terms = tuple(Term(one) for one in given if one is not None)
        return TokenBatch({"ids": input_ids, "mask": mask, "types": types}, terms, (input_ids.shape[1],))

    def call(self, model: Any, part: TokenBatch, *, labelled: bool) -> Any:
        """Returns the losses of all words, or their logits; then the logits of pairs, or None without their head."""
        given = part.tensors
        labels = {"lm_labels": part.terms[0].targets.clamp(min=0)} if labelled else {}
        return model(given["ids"], given["mask"], tokentype_ids=given["types"], **labels)

    def sums(self, output: Any, part: TokenBatch) -> list[torch.Tensor]:
        """Returns the sums of the losses of words, and of pairs."""
        losses, pairs = output
        words, *rest = part.terms
        found = [(losses * (words.targets != IGNORED)).sum()]
        for term in rest:
            found.append(
                functional.cross_entropy(
                    pairs.to(accumulation_dtype(pairs.dtype)), term.targets.view(-1), reduction="sum"
                )
            )
        return found

    def shards(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Returns this rank's logits of words, and those of pairs."""
        words, pairs = output
        return (words,) if pairs is None else (words, pairs)

    def shapes(self, architecture: Architecture, batch: TokenBatch) -> list[tuple[int, ...]]:
        """Returns the shapes of the full logits of words, and of pairs."""
        words = super().shapes(architecture, batch)
        return [*words, (batch.samples, 2)] if architecture.model["add_binary_head"] else words

    def result(self, architecture: Architecture, loss: torch.Tensor | None, logits: Sequence[torch.Tensor]) -> Any:
        """Returns the loss, and the logits of words and of pairs."""
        from transformers.modeling_outputs import MaskedLMOutput
        from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

        words, pairs = (*logits, None, None)[:2]
        if not architecture.model["add_binary_head"]:
            return MaskedLMOutput(loss=loss, logits=words)
        return BertForPreTrainingOutput(loss=loss, prediction_logits=words, seq_relationship_logits=pairs)


@final
class NormAfterSum(nn.Module):
    """Dropout, sum and norm behind a part of a layer of the original BERT.

    megatron-core calls it for a function that takes a part's output with its bias, the residual, and the dropout.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm: nn.Module = MarkedNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Returns the function."""
        return partial(self._sum, training)

    def _sum(
        self, training: bool, output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        value, bias = output
        if bias is not None:
            value = value + bias
        normed: torch.Tensor = self.norm(residual + functional.dropout(value, dropout, training))
        return normed


def _layer(config: Any, *, after: bool) -> Any:
    """Returns megatron-core's specification of a layer, with norms before its parts, or ``after`` their sums."""
    from copy import deepcopy

    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer: Any = deepcopy(bert_layer_local_spec)
    use_context_attention(config, layer)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp if after else MarkedNorm
    if after:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormAfterSum, params={"config": config})
        parts.sharded_state_dict_keys_map = {}
    return layer


def _mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns what all tokens do not attend to; a padded one attends to the others, as in Transformers."""
    return (attention_mask == 0)[:, None, None, :]


def _positions(ranks: ContextRanks, longest: int, ids: torch.Tensor) -> torch.Tensor:
    """Returns the positions of this rank's tokens; those of padding, which may be behind ``longest``, do not matter."""
    own = ranks.positions(ids.shape[1] * ranks.size, ids.device)
    return own.clamp(max=longest - 1).expand_as(ids)
