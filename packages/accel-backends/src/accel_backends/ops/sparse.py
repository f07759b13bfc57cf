"""Embeddings with sparse gradients, which cannot be sharded."""

from collections.abc import Iterator

from torch import nn


def sparse_embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Yields the embeddings of a model that were built with ``sparse=True``, with torch's names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name, module
