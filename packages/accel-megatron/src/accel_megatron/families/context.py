"""Context parallelism: ranks hold shards of the same sequences, and attention reads the keys of all of them."""

from contextlib import nullcontext
from dataclasses import dataclass
from math import lcm
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accel_backends.parallel.attention.gathered import gathered_sequences
from accel_backends.parallel.attention.positions import SequenceSharding


def padded_length(config: Any, length: int) -> int:
    """Returns the number of tokens to which sequences are padded, so that all ranks hold shards of one size.

    ``config``: megatron-core's ``TransformerConfig``. Without context parallelism sequences keep their length.
    """
    size: int = config.context_parallel_size
    if size == 1:
        return length
    multiple = size * lcm(2, config.tensor_model_parallel_size if config.sequence_parallel else 1)
    return length + -length % multiple


@final
@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Ranks that hold the shards of the same sequences: each a chunk of the head, and one of the tail.

    Attributes:
        group: of these ranks.
        sharding: division of the positions among them, which is that of megatron-core's rotary positions.
    """

    group: dist.ProcessGroup
    sharding: SequenceSharding

    @classmethod
    def of(cls, config: Any) -> "ContextRanks | None":
        """Returns those of this rank; None without context parallelism."""
        from megatron.core import parallel_state

        if config.context_parallel_size == 1:
            return None
        return cls(parallel_state.get_context_parallel_group(), SequenceSharding(config.context_parallel_size))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.sharding.size

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Returns the positions of this rank's tokens in sequences of ``length`` tokens, ascending."""
        return self.sharding.positions(length, self.group.rank(), device=device)

    def full_keys(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of full sequences; differentiable. All are [tokens, samples, heads, size].

        Collective: every rank of the group must call this.
        """
        shard = torch.cat([key, value], -1).permute(1, 2, 0, 3)
        full = gathered_sequences(shard, group=self.group, sharding=self.sharding).permute(2, 0, 1, 3)
        keys, values = full.split([key.shape[-1], value.shape[-1]], -1)
        return keys, values


def use_context_attention(config: Any, layer: Any) -> None:
    """Replaces the attention in megatron-core's specification of a layer by ``ContextAttention``, if ranks need it."""
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = ContextAttention


@final
class ContextAttention(nn.Module):
    """Attention of this rank's queries to the keys of full sequences, by torch's kernels.

    megatron-core's own needs Transformer Engine for that.
    """

    def __init__(self, config: Any, *, attn_mask_type: Any, softmax_scale: float | None = None, **options: Any) -> None:
        super().__init__()
        from megatron.core.transformer.enums import AttnMaskType

        self.config = config
        self.causal = attn_mask_type == AttnMaskType.causal
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Returns what all heads of this rank read, [queries, samples, heads * size].

        ``query``, ``key`` and ``value``: [tokens of this rank, samples, heads, size], with fewer heads of keys if their
        queries share them. ``attention_mask``: True where a query does not read a key, broadcasts to [samples, heads,
        queries, tokens of full sequences]; None: no mask. If it is the same for all queries, attention that is
        causal hides later tokens, too.

        Collective: every context-parallel rank must call this.
        """
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        ranks = ContextRanks.of(self.config)
        assert ranks is not None
        # On CUDA no fast kernel has both a mask and grouped heads.
        shared = query.shape[2] // key.shape[2]
        keys, values = (one.repeat_interleave(shared, 2) for one in ranks.full_keys(key, value))
        if self.causal and (attention_mask is None or attention_mask.shape[-2] == 1):
            own = ranks.positions(keys.shape[0], keys.device)
            later = torch.arange(keys.shape[0], device=keys.device) > own[:, None]
            attention_mask = later if attention_mask is None else attention_mask | later
        seen = None
        if attention_mask is not None:
            # A token that reads none, which is padding that no other one reads, would be nan.
            seen = ~attention_mask | attention_mask.all(-1, keepdim=True)
        with nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
            found = functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                keys.permute(1, 2, 0, 3),
                values.permute(1, 2, 0, 3),
                attn_mask=seen,
                dropout_p=self.config.attention_dropout if self.training else 0.0,
                scale=self.scale,
            )
        return found.permute(2, 0, 1, 3).flatten(2).contiguous()
