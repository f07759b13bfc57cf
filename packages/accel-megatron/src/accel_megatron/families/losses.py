"""Cross-entropy of logits whose vocabulary is sharded over tensor-parallel ranks."""

import torch
import torch.distributed as dist


def vocab_parallel_losses(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Returns the losses of all tokens, [samples, tokens], in the dtype of ``logits``.

    megatron-core's own function computes in fp32, whatever the dtype of its logits is.

    Collective: every tensor-parallel rank must call this.

    Args:
        labels: [samples, tokens], the same on all tensor-parallel ranks.
        logits: of this rank's shard of the vocabulary, [tokens, samples, shard].
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    shard = logits.shape[-1]
    local = labels.t() - group.rank() * shard
    elsewhere = (local < 0) | (local >= shard)
    own = shifted.gather(-1, local.clamp(0, shard - 1)[..., None]).squeeze(-1).masked_fill(elsewhere, 0)
    chosen: torch.Tensor = reduce_from_tensor_model_parallel_region(own)
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1))
    return (total.log() - chosen).t().contiguous()
