"""Embedding of the padding token, whose lookups give no gradient, as in Transformers."""

from typing import Any

import torch


def stop_padding(embedding: Any, token: int) -> None:
    """Makes lookups of ``token`` in one of megatron-core's embeddings give its row no gradient."""

    def stop(module: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        padded = given[0] == token
        if module.reduce_scatter_embeddings:  # [tokens of this rank, samples, size]
            padded = padded.t().chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(padded[..., None], output.detach(), output)

    embedding.register_forward_hook(stop)
