"""Causal language models: megatron-core's ``GPTModel``."""

from collections.abc import Sequence
from typing import Any, final

import torch

from accel_megatron.conversion.architecture import Architecture
from accel_megatron.families.context import use_context_attention
from accel_megatron.families.family import IGNORED, Family, Term, TokenBatch, causal_mask, layers_of
from accel_megatron.families.norm import MarkedNorm
from accel_megatron.families.router import plain_router
from accel_state.errors import BackendError


@final
class GPTFamily(Family):
    """Llama, Mixtral and GPT-2."""

    def build(
        self, config: Any, architecture: Architecture, *, first: bool, last: bool, num_layers: int, chunk: int | None
    ) -> Any:
        """Returns a ``GPTModel`` of one stage, or of a chunk of it."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        layer = get_gpt_layer_local_spec(
            num_experts=architecture.num_experts or None, moe_grouped_gemm=False, normalization=config.normalization
        )
        if architecture.num_experts:
            layer.submodules.mlp.submodules.router = plain_router
        use_context_attention(config, layer)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MarkedNorm
        return GPTModel(
            config=config,
            transformer_layer_spec=layers_of(layer, num_layers, MarkedNorm),
            pre_process=first,
            post_process=last,
            vp_stage=chunk,
            **architecture.model,
        )

    def batch(
        self,
        architecture: Architecture,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> TokenBatch:
        """Returns the batch; labels are shifted by one token.

        ``tokens`` and ``loss_mask`` are of Megatron-LM's data sets, which have shifted their labels already, and whose
        ``attention_mask`` is True where a token does not read another, [samples, 1, tokens, tokens].

        Raises:
            BackendError: neither or both of ``input_ids`` and ``tokens``; or ``position_ids`` beside ``input_ids`` that
                begin anew within a row.
        """
        ids = input_ids if tokens is None else tokens
        if ids is None or (input_ids is not None and tokens is not None):
            count = "neither" if ids is None else "both"
            raise BackendError(f"expected input_ids, or tokens of Megatron-LM's data sets; the call has {count}")
        samples, length = ids.shape
        given = position_ids
        if position_ids is None:
            position_ids = torch.arange(length, device=ids.device)
        if attention_mask is None:
            mask = torch.zeros(samples, 1, 1, length, dtype=torch.bool, device=ids.device)
        else:
            mask = causal_mask(attention_mask) if tokens is not None else (attention_mask == 0)[:, None, None, :]
        terms: tuple[Term, ...] = ()
        if labels is not None and tokens is not None:
            terms = (Term(labels if loss_mask is None else labels.masked_fill(loss_mask == 0, IGNORED)),)
        elif labels is not None:
            targets = torch.full_like(ids, IGNORED)
            targets[:, :-1] = labels[:, 1:]
            terms = (Term(targets),)
        positions = position_ids.expand(samples, length)
        if given is not None and tokens is None:
            _check_positions(positions, mask)
        return TokenBatch({"ids": ids, "positions": positions, "mask": mask}, terms, (length,))

    def call(self, model: Any, part: TokenBatch, *, labelled: bool) -> Any:
        """Returns the losses of all tokens, or their logits."""
        given = part.tensors
        labels = {"labels": part.terms[0].targets.clamp(min=0)} if labelled else {}
        # Context-parallel ranks hide later tokens in attention, so that none has the mask of full sequences.
        mask = given["mask"] if model.config.context_parallel_size > 1 else causal_mask(given["mask"])
        return model(given["ids"], given["positions"], mask, **labels)

    def result(self, architecture: Architecture, loss: torch.Tensor | None, logits: Sequence[torch.Tensor]) -> Any:
        """Returns the loss, and the logits of all tokens."""
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss, logits=next(iter(logits), None))


def _check_positions(positions: torch.Tensor, hidden: torch.Tensor) -> None:
    """Refuses rows of several sequences, which Transformers keeps apart.

    Here rotary positions are those of the tokens in the row, and a token reads all that are before it.

    Raises:
        BackendError: a token that is not hidden has not the position behind the one before it.
    """
    seen = ~hidden[:, 0, 0]
    breaks = (positions.diff() != 1) & seen[:, 1:] & seen[:, :-1]
    if breaks.any():
        row, place = breaks.nonzero()[0].tolist()
        before, after = positions[row, place : place + 2].tolist()
        raise BackendError(
            f"position_ids of row {row} go from {before} to {after} at token {place + 1}: with input_ids, each row is "
            "one sequence under Megatron-LM; nearest: one sequence a row with an attention_mask, or tokens, labels and "
            "masks as Megatron-LM's data sets have them"
        )
