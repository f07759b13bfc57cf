"""Private names of torch and DeepSpeed that this package uses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel


@contextmanager
def synchronising(model: Any) -> Iterator[None]:
    """Within the block, DDP reduces the gradients of a forward that ran under ``no_sync``.

    torch has no public name for the preparation of the reducer; without it, the gradients stay those of this rank.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def is_compiled(module: Any) -> bool:
    """Whether torch.compile returned this module; torch does not export the class of such modules."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def sampler_length(sampler: Any) -> int | None:
    """Number of samples that a RandomSampler was told to draw, which torch has no public name for; None: all."""
    count: int | None = sampler._num_samples
    return count


def publish_sequence_group(group: Any) -> Callable[[], None]:
    """Makes DeepSpeed's functions return a sequence-parallel group to scripts, until the returned function is called.

    The size that DeepSpeed knows stays 1, because accel's engines average gradients over all ranks.
    """
    from deepspeed.utils import groups

    published: dict[str, Any] = {
        "_get_sequence_parallel_group": lambda: group,
        "_get_sequence_parallel_rank": group.rank,
    }
    before = {name: getattr(groups, name) for name in published}
    groups.__dict__.update(published)
    return lambda: groups.__dict__.update(before)
