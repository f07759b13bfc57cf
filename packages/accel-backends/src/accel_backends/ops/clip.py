"""Gradient clipping by norm over all ranks, or by value, for plain tensors and DTensors."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import Any, cast

import torch
from torch import nn

from accel_backends.ops.fqn import few
from accel_backends.private import clamp, multiply, norms_of
from accel_state.errors import BackendError
from accel_state.watchdog.decorator import recorded

Names = Callable[[], Mapping[int, str]]
Places = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
#: A device mesh, and its dimensions over which plain gradients are sharded.
Pieces = tuple[Any, tuple[int, ...]]


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    names: Names | None = None,
    pieces: Pieces | None = None,
) -> torch.Tensor:
    """Scales gradients down to a joint norm of at most ``max_norm``; returns the norm before scaling.

    The norm is that of the model's full gradient: plain tensors count once, because every rank holds the same values,
    and the norms of DTensor shards are reduced over the mesh dimensions that shard them. Norms over several meshes and
    of plain tensors are combined. No value is read back from the device.

    Args:
        max_norm: largest norm allowed; ``inf`` only measures.
        norm_type: any p > 0, or ``inf``.
        error_if_nonfinite: raise instead of scaling if the norm is nan or infinite (synchronises with the device).
        names: returns parameter names by ``id``, for that error.
        pieces: mesh and dimensions over which plain tensors are sharded; None: plain tensors are full. With ``pieces``
            all ranks of these dimensions have to call this, those without gradients included.

    Returns:
        A scalar on the device of the first gradient, 0 without gradients.

    Raises:
        BackendError: a norm that is not positive, a limit that is no number >= 0, or a non-finite norm, with the names
            of the responsible parameters.
    """
    check_norm_type(norm_type)
    check_limit("max_norm", max_norm)
    every = listed(parameters)
    kept = [parameter for parameter in every if parameter.grad is not None]
    gradients = _gradients(kept)
    if not gradients and (pieces is None or not every):
        return torch.tensor(0.0)
    with torch.no_grad():
        places, sharded = _sorted(gradients)
        sharded = sharded or pieces is not None
        total = (
            total_norm(gradients if pieces is None else _with_empty(every), norm_type, pieces=pieces)
            if sharded
            else _joined(_norms(places, norm_type), norm_type, gradients[0].device)
        )
        if error_if_nonfinite:
            check_norm(total, norm_type, lambda: nonfinite(kept, names))
        _scale_down(places, total, max_norm)
    return total


def scale_down(parameters: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scales gradients whose joint norm is ``total`` down to a norm of at most ``max_norm``, in place."""
    with torch.no_grad():
        _scale_down(_by_place(_gradients(parameters)), total, max_norm)


def check_norm_type(norm_type: float) -> None:
    """Raises BackendError for a norm that is not positive."""
    if not (isinstance(norm_type, Real) and float(norm_type) > 0.0):
        raise BackendError(f"norm_type is {norm_type!r}; expected a positive number or inf")


def check_limit(name: str, limit: object) -> None:
    """Checks that a limit of gradients is a number >= 0; a tensor is not read, which would wait for its device.

    Raises:
        BackendError: it is none; a negative limit would turn the gradients around.
    """
    if not (isinstance(limit, torch.Tensor) or (isinstance(limit, Real) and float(limit) >= 0.0)):
        raise BackendError(f"{name} is {limit!r}; expected a number >= 0 (inf: no limit)")


def check_norm(total: torch.Tensor, norm_type: float, culprits: Callable[[], str]) -> None:
    """Raises BackendError for a norm that is nan or infinite; synchronises with the device.

    ``culprits``: returns the names of this rank's gradients with nan or inf.
    """
    if not bool(torch.isfinite(total)):
        raise BackendError(
            f"the gradient norm (p={norm_type:g}) is {float(total)}; gradients with nan or inf: "
            f"{culprits() or 'none on this rank'}"
        )


def clip_grad_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamps every element of the gradients to ``[-clip_value, clip_value]``, in place."""
    check_limit("clip_value", clip_value)
    with torch.no_grad():
        for group in _by_place(_gradients(listed(parameters))).values():
            clamp(group, -clip_value, clip_value)


def total_norm(gradients: list[torch.Tensor], norm_type: float, *, pieces: Pieces | None = None) -> torch.Tensor:
    """Returns the joint norm of all gradients, a scalar on the device of the first.

    ``pieces`` as in ``clip_grad_norm``.
    """
    plain: list[torch.Tensor] = []
    meshes: dict[Pieces, list[torch.Tensor]] = {}
    for gradient in gradients:
        if _is_sharded(gradient):
            reduced, dims = _reducible(gradient)
            meshes.setdefault((reduced.device_mesh, dims), []).append(reduced.to_local())
        elif pieces is not None:
            meshes.setdefault(pieces, []).append(gradient)
        else:
            plain.append(gradient)
    parts = _norms(_by_place(plain), norm_type)
    for (mesh, dims), group in meshes.items():
        filled = [local for local in group if local.numel()]
        # The same on every rank; norms of complex gradients are real.
        dtype = reduce(torch.promote_types, (local.dtype for local in group)).to_real()
        zero = torch.zeros((), device=group[0].device, dtype=dtype)
        own = _joined(_norms(_by_place(filled), norm_type), norm_type, zero.device).to(dtype) if filled else zero
        parts.append(_over_mesh(own, mesh, dims, norm_type))
    return _joined(parts, norm_type, _local(gradients[0]).device)


def norm_of_held(
    models: Iterable[tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]],
    parameters: "torch.Tensor | Iterable[torch.Tensor]",
    norm_type: float,
) -> torch.Tensor:
    """Returns the norm of the gradients of ``parameters``.

    ``models``: parameters and gradients of each model by FQN.
    """
    asked = {id(parameter) for parameter in listed(parameters)}
    held = [
        gradients[name]
        for named, gradients in models
        for name, parameter in named.items()
        if id(parameter) in asked and name in gradients
    ]
    return total_norm(held, norm_type) if held else torch.tensor(0.0)


def nonfinite(parameters: Iterable[torch.Tensor], names: Names | None) -> str:
    """Returns the names of the first ten parameters whose gradients on this rank contain nan or inf."""
    known = names() if names is not None else {}
    with_gradient = [(position, one) for position, one in enumerate(parameters) if one.grad is not None]
    good = finite([one.grad for _, one in with_gradient if one.grad is not None])
    bad = [place for place, fine in zip(with_gradient, good, strict=True) if not fine]
    return few([known.get(id(parameter), f"parameter {position}") for position, parameter in bad], 10)


def finite(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """Whether all of this rank's elements of each gradient are finite."""
    return [bool(torch.isfinite(_local(gradient)).all()) for gradient in gradients]


def listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parameters to clip as a list; a single one may be given.

    Raises:
        BackendError: a module was given.
    """
    if isinstance(parameters, nn.Module):
        raise BackendError(f"clipping was given a {type(parameters).__name__}; expected its parameters()")
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the existing gradients; sparse ones are coalesced in place, so that each index has one value."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
        found.append(gradient)
    return found


def _with_empty(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradient of every parameter, an empty tensor for those without one on this rank."""
    return [p.detach().new_empty(0) if p.grad is None else p.grad for p in parameters]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        return cast(torch.Tensor, tensor.to_local())
    return tensor._values() if tensor.is_sparse else tensor


def _by_place(gradients: list[torch.Tensor]) -> Places:
    return _sorted(gradients)[0]


def _sorted(gradients: list[torch.Tensor]) -> tuple[Places, bool]:
    """Groups the local tensors of gradients by device and dtype; also returns whether any gradient is a DTensor."""
    groups: Places = {}
    sharded = False
    for gradient in gradients:
        local = gradient
        if type(gradient) is not torch.Tensor or gradient.is_sparse:
            local = _local(gradient)
            sharded = sharded or _is_sharded(gradient)
        place = local.device, local.dtype
        if place in groups:
            groups[place].append(local)
        else:
            groups[place] = [local]
    return groups, sharded


def _norms(places: Places, norm_type: float) -> list[torch.Tensor]:
    norms: list[torch.Tensor] = []
    for group in places.values():
        if norm_type == math.inf:  # torch has no largest element of a tensor without any
            group = [tensor for tensor in group if tensor.numel()]
        norms.extend(norms_of(group, norm_type))
    return norms


def _joined(norms: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not norms:
        return torch.zeros((), device=device)
    stacked = torch.stack([norm if norm.device == device else norm.to(device) for norm in norms])
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return norm


def _reducible(gradient: Any) -> tuple[Any, tuple[int, ...]]:
    """Reduces partial sums of a DTensor; returns the DTensor and the mesh dimensions over which it is sharded."""
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        reduced = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=reduced)
    return gradient, tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())


@recorded("gradient norm", shared=False)
def _over_mesh(norm: torch.Tensor, mesh: Any, dims: tuple[int, ...], norm_type: float) -> torch.Tensor:
    """Combines the norms of all ranks' shards, by an all-reduce on the mesh's device for each of ``dims``."""
    groups = [mesh.get_group(dim) for dim in dims]
    wide = norm.to(mesh.device_type, torch.promote_types(norm.dtype, torch.float32))  # powers of it overflow float16
    return norm_over(groups, wide, norm_type).to(norm.device, norm.dtype)


def norm_over(groups: Iterable[Any], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Returns the joint norm over the ranks of process groups, from this rank's norm on their device.

    Collective: every rank of the groups must call this.
    """
    import torch.distributed as dist

    from accel_state.collectives.tensors import from_order, in_order

    if norm_type != math.inf:
        part = norm**norm_type
        for group in groups:
            dist.all_reduce(part, group=group)
        return part ** (1.0 / norm_type)
    largest = in_order(norm, nan_last=True)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return from_order(largest).to(norm.dtype)


def _scale_down(places: Places, total: torch.Tensor, max_norm: float) -> None:
    if max_norm != math.inf:
        _scale(places, torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _scale(places: Places, factor: torch.Tensor) -> None:
    for (device, _), group in places.items():
        multiply(group, factor if factor.device == device else factor.to(device))


def scale_gradients(models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
    """Multiplies every gradient of the models in place, the gradients of tied parameters once."""
    gradients = {id(p.grad): p.grad for model in models for p in model.parameters() if p.grad is not None}
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients.values():  # torch's foreach loops take DTensors of one mesh
        own = cast(Any, gradient).to_local() if _is_sharded(gradient) else gradient
        by_dtype.setdefault((own.dtype, own.device), []).append(own)
    for (dtype, device), group in by_dtype.items():
        if isinstance(factor, torch.Tensor):
            multiply(group, factor.to(device=device, dtype=dtype))
        else:
            multiply(group, factor)
