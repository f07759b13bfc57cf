"""Load-balancing loss of a router over the tokens of all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def load_balancing_loss(logits: Sequence[torch.Tensor], *, top_k: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Loss of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, equation 4) for ``top_k`` choices per token.

    It is the number of experts times the sum over experts of the share of choices and the mean probability. Both are
    means over the tokens of all ranks and layers. A mean of each rank's own loss differs, because the loss is a product
    of means. The value is the same on every rank, and gradients are those of one process once they are *averaged* over
    the ranks, each of which must have as many tokens.

    Args:
        logits: of each layer's router, for this rank's tokens (tokens x experts).
        top_k: experts chosen for each token.
        group: ranks with other tokens.

    Collective: every rank of the group must call this.
    """
    probabilities = torch.cat([one.float().softmax(-1) for one in logits])
    experts = probabilities.shape[-1]
    chosen = probabilities.detach().topk(top_k, dim=-1).indices.flatten()
    choices = torch.bincount(chosen, minlength=experts).to(probabilities.dtype) / len(probabilities)
    mean = probabilities.mean(0)
    both = torch.stack([choices, mean.detach()])
    dist.all_reduce(both, group=group)
    both /= dist.get_world_size(group)
    # The share of choices has no gradient; each rank's probabilities have their part of that of the mean.
    ours = experts * (both[0] * mean).sum()
    return ours + (experts * (both[0] * both[1]).sum() - ours).detach()
