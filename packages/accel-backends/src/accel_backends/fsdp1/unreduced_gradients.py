"""Unreduced gradients of an FSDP1 model within an accumulation window."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_backends.ops.averaging import averaged, brought_by_any
from accel_backends.ops.fqn import places
from accel_backends.private import end_flat_backward
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel


class _Unit(NamedTuple):
    """One flat parameter: torch's handle, and the FQNs of its original parameters, in their order."""

    handle: Any
    names: list[str]

    @property
    def flat(self) -> Any:
        return self.handle.flat_param


def unreduced_gradients(model: "FullyShardedDataParallel") -> dict[str, torch.Tensor]:
    """Returns this rank's unreduced gradients as full tensors, by FQN, reduced parts of the window included.

    torch keeps the sum of unreduced gradients as one full flat gradient, and this rank's shard of the reduced ones
    beside it.

    Collective: every rank of the group must call this.

    Raises:
        BackendError: the user has wrapped the model with ``use_orig_params=False``.
    """
    found: dict[str, torch.Tensor] = {}
    for unit in _units(model):
        full = _full(unit)
        if full is not None:
            views = unit.handle._get_unflat_views(full)
            trained = (parameter.requires_grad for parameter in unit.flat._params)
            found |= {
                name: view.clone() for name, view, trains in zip(unit.names, views, trained, strict=True) if trains
            }
    return found


def set_unreduced_gradients(
    model: "FullyShardedDataParallel", gradients: Mapping[str, torch.Tensor], *, group: Any = None
) -> None:
    """Sets every parameter's gradient to this rank's shard of the mean over ranks of the given gradients.

    Collective: every rank of the group must call this.

    Raises:
        BackendError: the user has wrapped the model with ``use_orig_params=False``.
    """
    brought = brought_by_any(gradients, group)
    drop_gradients(model)
    for handle, names in _units(model) if brought else ():
        flat = handle.flat_param
        pieces = flat._shard_param_infos
        for name, parameter, shape, piece in zip(names, flat._params, flat._shapes, pieces, strict=True):
            if name not in brought:
                continue
            empty = torch.zeros(shape, dtype=parameter.dtype, device=handle.device)
            total = averaged(gradients.get(name), empty, group)
            if piece.in_shard:
                first, last = piece.intra_param_start_idx, piece.intra_param_end_idx
                parameter.grad = total.flatten()[first : last + 1].view(parameter.shape)


def drop_gradients(model: "FullyShardedDataParallel") -> None:
    """Drops all gradients, also of flat parameters that the optimizer sees themselves."""
    for parameter in model.parameters():
        parameter.grad = None
    for flat in _flat_parameters(model):
        flat.grad = None
        if hasattr(flat, "_saved_grad_shard"):
            del flat._saved_grad_shard  # torch adds to the gradient if this attribute exists
        for parameter in getattr(flat, "_params", None) or ():
            parameter.grad = None


def _flat_parameters(model: "FullyShardedDataParallel") -> list[Any]:
    units = type(model).fsdp_modules(model)
    return [unit._handle.flat_param for unit in units if unit._handle is not None]


def leave_backward(unit: "FullyShardedDataParallel") -> None:
    """Ends a backward that failed, of an outermost wrapper that it reached, and drops the model's gradients.

    Otherwise torch takes the next forward for a recomputation, and adds what some units have got to later steps.
    """
    if getattr(unit, "_post_backward_callback_queued", False):  # of an outermost wrapper: a backward has begun
        end_flat_backward(unit, _flat_parameters(unit))
        drop_gradients(unit)


def _units(model: "FullyShardedDataParallel") -> Iterator[_Unit]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    prefixes: dict[int, str] = {}
    for place in places(model):
        prefixes.setdefault(id(place.module), place.prefix)
    for wrapped in FullyShardedDataParallel.fsdp_modules(model):
        if (handle := wrapped._handle) is not None:
            if not handle._use_orig_params:
                raise BackendError(
                    "a checkpoint within an accumulation window needs parameters of their own, and this model was "
                    "wrapped with use_orig_params=False; save after a step, or wrap it with use_orig_params=True"
                )
            infos = handle.flat_param._param_infos
            yield _Unit(handle, [prefixes[id(info.module)] + info.param_name for info in infos])


def _full(unit: _Unit) -> torch.Tensor | None:
    """Returns the unreduced flat gradient plus the reduced one (all-gathered, equal on all ranks), as a full tensor."""
    unit.handle._reset_flat_param_grad_info_if_needed()  # zero_grad has cleared the original parameters only
    reduced: torch.Tensor | None = getattr(unit.flat, "_saved_grad_shard", None)
    added: torch.Tensor | None = unit.flat.grad
    if reduced is None and added is None:
        reduced = _set_on_parameters(unit)
    if added is not None and added.shape != unit.flat._unpadded_unsharded_size:
        reduced, added = added, None
    gathered = _gathered(unit, reduced)
    if added is None or gathered is None:
        return gathered if added is None else added
    return added + gathered  # in the wider dtype of both


def _set_on_parameters(unit: _Unit) -> torch.Tensor | None:
    """Returns this rank's shard of gradients that a load has set, and no backward has added to; None without one."""
    infos = zip(unit.flat._params, unit.flat._shard_param_infos, strict=True)
    held = [(parameter.grad, info) for parameter, info in infos if info.in_shard and parameter.grad is not None]
    if not held:
        return None
    shard = torch.zeros_like(unit.flat._local_shard)
    for gradient, info in held:
        shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] = gradient.flatten()
    return shard


def _gathered(unit: _Unit, piece: torch.Tensor | None) -> torch.Tensor | None:
    """All-gathers the shards of a flat gradient; None if no rank has one.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    group = unit.handle.process_group
    ranks = dist.get_world_size(group)
    there = torch.tensor([float(piece is not None)], device=unit.handle.device)
    dist.all_reduce(there, group=group)
    if not there.item():
        return None
    mine = torch.zeros_like(unit.flat._local_shard) if piece is None else piece
    every = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(every, mine.contiguous(), group=group)
    return torch.cat(every)[: unit.flat._unpadded_unsharded_size.numel()]
