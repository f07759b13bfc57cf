"""Average of tensors over ranks in few collectives."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_backends.ops.dtensor import local_of
from accel_state.collectives.objects import all_gather_object


def average_tensors(tensors: Sequence[torch.Tensor], group: Any = None) -> None:
    """Replaces each tensor by its mean over the ranks of ``group``, in place: one all-reduce per dtype and device.

    Integer tensors are left alone. Sparse ones, of other rows on each rank, get the rows of all ranks.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size(group)
    places: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            places.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    with torch.no_grad():
        for parts in places.values():
            dense = [part.to_dense() if part.is_sparse else part for part in parts]
            flat = torch.cat([part.reshape(-1) for part in dense]).div_(world_size)
            dist.all_reduce(flat, group=group)
            for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                whole = mean.view(part.shape)
                part.copy_(whole.to_sparse(part.sparse_dim()) if part.is_sparse else whole)


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], group: Any = None) -> None:
    """Averages the gradients of parameters over the ranks of ``group``: one all-reduce per dtype and device.

    A parameter that only some ranks have used counts as zero on the others, and gets a gradient there; one that no rank
    has used keeps ``grad`` None. Of DTensors, shards are averaged. A rank with all gradients does not wait for its
    device.

    Collective: every rank of the group must call this.
    """
    if not parameters:
        return
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    used = _used_flags(parameters)
    average_tensors([*map(local_of, gradients), used], group)
    if any(one.grad is None for one in parameters):
        for parameter, gradient, anywhere in zip(parameters, gradients, used.bool().tolist(), strict=True):
            if anywhere:
                parameter.grad = gradient


@torch.no_grad()
def complete_gradients(parameters: Sequence[torch.Tensor], group: Any = None) -> None:
    """Gives a gradient of zeros to parameters that have one on another rank of ``group``; averages nothing.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    if not parameters:
        return
    used = _used_flags(parameters)
    dist.all_reduce(used, group=group)
    if any(one.grad is None for one in parameters):
        for parameter, anywhere in zip(parameters, used.bool().tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _used_flags(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns 1 for each parameter with a gradient and 0 for the others, in the dtype of the first parameter.

    If all have one, the tensor is made on the device: a copy to a device waits for it.
    """
    used, like = [one.grad is not None for one in parameters], local_of(parameters[0])
    return like.new_ones(len(used)) if all(used) else like.new_tensor(used)


def brought_by_any(gradients: Mapping[str, torch.Tensor], group: Any = None) -> set[str]:
    """Returns the names that any rank has. Collective: every rank of the group must call this."""
    return {name for names in all_gather_object(sorted(gradients), group=group) for name in names}


def averaged(mine: torch.Tensor | None, total: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Writes the mean over ranks of ``mine`` (None counts as zero) into ``total``, which has to be zero.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    if mine is not None:
        total.copy_(mine)
    if (ranks := dist.get_world_size(group)) > 1:
        dist.all_reduce(total, group=group)
    return total.div_(ranks)
