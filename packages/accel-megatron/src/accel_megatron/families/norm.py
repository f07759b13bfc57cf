"""Norms of megatron-core's layers without Transformer Engine and Apex, also under sequence parallelism."""

from typing import Any, final

from torch import nn


@final
class MarkedNorm:
    """Torch's LayerNorm or RMSNorm, as the ``TransformerConfig`` says.

    Its parameters are marked, so that megatron-core sums their gradients over tensor-parallel ranks if each rank
    normalises other tokens. A class, because megatron-core takes functions in its layer specifications as they are.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        """Returns the norm."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
