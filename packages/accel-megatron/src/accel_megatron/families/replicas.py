"""Values of all data-parallel ranks, for losses and metrics of the user's own."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the means of scalar losses over data-parallel ranks, [losses], without gradients.

    Collective: every data-parallel rank must call this.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    means = torch.stack([loss.detach().view(()) for loss in losses])
    dist.all_reduce(means, group=group)
    return means.div_(group.size())


def gather_across_data_parallel_groups(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensors of all data-parallel ranks, joined along the first dim; scalars become one row each.

    Collective: every data-parallel rank must call this, with tensors of one shape.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    own = torch.atleast_1d(tensor.detach()).contiguous()
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return torch.cat(found)
