"""Expert parallelism: experts are divided among the ranks of one mesh axis, and tokens travel to their experts.

GShard (Lepikhin et al. 2020, arXiv:2006.16668) introduced the exchange by all-to-all. Here it is dropless, unless a
capacity is given: as many tokens are exchanged as the router has chosen.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_backends.ops.activation_checkpointing import RECOMPUTED
from accel_backends.ops.meta_init import make_empty
from accel_backends.parallel.capacity import Capacity, count_choices
from accel_state.errors import PrepareError
from accel_state.private import untraced

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_ARGUMENTS_OF = frozenset({_ARGUMENTS, ("hidden_states", "router_indices", "routing_weights")})  # the latter: gpt-oss


Values = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns a parameter's full values on the device of the mesh, equal on every rank."""


def apply_expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    average: bool = True,
    src_data_rank: int | None = 0,
    values: Values | None = None,
    capacity: Capacity | None = None,
) -> list[str]:
    """Divides the experts of a model's blocks among the ranks of ``mesh`` in place; returns the names of their modules.

    The ranks are data-parallel otherwise: each has samples of its own. Parameters of experts become DTensors sharded
    over the experts, under the same names and with the full tensors of one process. With ``average`` their gradients
    are divided by the number of ranks, so that they are means over the ranks as DDP's and FSDP's gradients are; they
    must not be reduced over this mesh again. With ``values`` each rank takes its experts from there, one parameter
    after the other, and frees the full parameter; otherwise rank ``src_data_rank`` of the mesh sends them.

    ``capacity`` bounds the choices of a rank's tokens that each expert computes while the module trains; None: experts
    compute all of them. Evaluation is dropless.

    Modules of experts are those of transformers' Mixtral and its kin: parameters with one dim for the experts, first,
    and a forward of ``hidden_states`` (tokens x features), ``top_k_index`` and ``top_k_weights`` (tokens x choices).

    Raises:
        PrepareError: on every rank and before any change: a mesh of several axes, no such module, or a number of
            experts that the ranks do not divide.

    Collective: every rank of the mesh must call this.
    """
    if mesh.ndim != 1:
        raise PrepareError(
            f"expert parallelism over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}; nearest: mesh['ep'], its "
            "one axis"
        )
    check_expert_parallel(model, mesh.size())
    found = find_experts(model)
    for module in found.values():
        _divide(module, mesh, src_data_rank=src_data_rank, values=values)
        _exchange(module, mesh, average=average, capacity=capacity)
    return list(found)


def bound_experts(model: nn.Module, capacity: Capacity) -> list[str]:
    """Bounds the choices that undivided experts compute while they train, in place; returns the names of their modules.

    Each rank has all experts and applies the bound to its own tokens, so that it drops the choices that it would drop
    with divided experts, without communication. Modules of experts are those of ``apply_expert_parallel``; a part of a
    model may have none.
    """
    found = find_experts(model)
    for module in found.values():
        _bound(module, capacity)
    return list(found)


def check_bounded_experts(model: nn.Module) -> None:
    """Refuses a model without experts, to which a capacity would mean nothing; without communication.

    Raises:
        PrepareError: no module of experts.
    """
    if not find_experts(model):
        raise PrepareError(f"{_no_experts(model)}; nearest: ep_handler=None")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts by name, in the order of ``named_modules``, before and after they are divided."""
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def check_expert_parallel(model: nn.Module, size: int, *, shards: int = 1) -> None:
    """Refuses a model whose experts cannot be divided among ``size`` ranks; without communication.

    ``shards`` is the shard degree of each rank's experts.

    Raises:
        PrepareError: as ``apply_expert_parallel``; or no dim of the parameters divides into the shards.
    """
    found = find_experts(model)
    if not found:
        raise PrepareError(f"{_no_experts(model)}; nearest: ep_size=1")
    for name, module in found.items():
        _check_experts(module, name, size)
        for own, parameter in module.named_parameters(recurse=False):
            if _sharded_dim((len(parameter) // size, *parameter.shape[1:]), shards) is None:
                raise PrepareError(
                    f"{name}.{own} of shape {tuple(parameter.shape)} has no dim that divides into {shards} shards "
                    f"after its experts are divided among {size} ranks; nearest: dp_shard_size=1"
                )


def _no_experts(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no module of experts: parameters whose first dim is num_experts, and a forward of "
        f"{', '.join(_ARGUMENTS)}"
    )


def shard_placement(shards: int) -> Callable[[nn.Parameter], Shard]:
    """Function from an expert-parallel rank's parameter to the dim over which ``fully_shard`` shards it.

    That is the dim of the experts if the shards divide it, and the first one that they divide otherwise.
    """

    def place(parameter: nn.Parameter) -> Shard:
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        dim = _sharded_dim(tuple(held.shape), shards)
        assert dim is not None, "check_expert_parallel refuses others"
        return Shard(dim)

    return place


def _sharded_dim(shape: Sequence[int], shards: int) -> int | None:
    return next((dim for dim, size in enumerate(shape) if size % shards == 0), None)


def _is_experts(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    count = getattr(module, "num_experts", None)
    if not parameters or not isinstance(count, int):
        return False
    takes = tuple(inspect.signature(module.forward).parameters)
    return takes in _ARGUMENTS_OF and all(one.ndim > 1 and one.shape[0] == count for one in parameters)


def _check_experts(module: nn.Module, name: str, size: int) -> None:
    if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        raise PrepareError(
            f"the experts of {name} are DTensors already; expert parallelism comes before fully_shard, and once"
        )
    if hasattr(type(module), RECOMPUTED):
        raise PrepareError(
            f"activation_checkpointing recomputes {name}, whose experts ep_size divides; nearest: "
            "ActivationCheckpointing(blocks=...) with the class of the block around it"
        )
    count = cast(int, module.num_experts)
    if count % size:
        fitting = max(one for one in range(1, size + 1) if count % one == 0)
        raise PrepareError(
            f"{name} has {count} experts, which {size} expert-parallel ranks do not divide; nearest: {fitting} ranks"
        )


def _divide(module: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None, values: Values | None) -> None:
    """Shards the parameters over the experts."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if values is None:
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        else:
            held = values(parameter).chunk(mesh.size())[mesh.get_local_rank()]
            placed = DTensor.from_local(held.clone(), mesh, [Shard(0)], run_check=False)
            make_empty(parameter)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _exchange(module: nn.Module, mesh: DeviceMesh, *, average: bool, capacity: Capacity | None) -> None:
    """Replaces the forward by one that exchanges tokens around the forward of the class."""
    experts = cast(int, module.num_experts)
    local_experts = experts // mesh.size()
    scale, group = 1 / mesh.size() if average else 1.0, mesh.get_group()

    def forward(
        layer: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            with _local(layer, local_experts, scale) as parameters:
                if not len(rows):
                    return _linked(rows, parameters)
                # Weights are applied where the router chose them, after the way back.
                outputs: torch.Tensor = type(layer).forward(layer, rows, experts[:, None], rows.new_ones(len(rows), 1))
                return outputs

        kept = capacity.kept(top_k_index, experts) if capacity is not None and layer.training else None
        return routed(
            hidden_states, top_k_index, top_k_weights, compute, local_experts=local_experts, group=group, kept=kept
        )

    module.forward = MethodType(untraced(forward), module)


def _bound(module: nn.Module, capacity: Capacity) -> None:
    """Replaces the forward by one that gives the forward of the class the choices that the capacity keeps."""

    def forward(
        layer: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            if not len(rows):
                return _linked(rows, list(layer.parameters(recurse=False)))
            outputs: torch.Tensor = type(layer).forward(layer, rows, experts[:, None], rows.new_ones(len(rows), 1))
            return outputs

        if not layer.training:
            full: torch.Tensor = type(layer).forward(layer, hidden_states, top_k_index, top_k_weights)
            return full
        experts = cast(int, layer.num_experts)
        kept = capacity.kept(top_k_index, experts)
        return routed(hidden_states, top_k_index, top_k_weights, compute, local_experts=experts, group=None, kept=kept)

    module.forward = MethodType(untraced(forward), module)


def routed(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    local_experts: int,
    group: dist.ProcessGroup | None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum over each token's chosen experts, wherever these are; differentiable.

    Args:
        hidden: this rank's tokens (tokens x features).
        index: experts chosen for each token (tokens x choices), counted over all ranks.
        weights: weight of each choice.
        compute: outputs of this rank's experts for rows of any rank, given their experts, counted on this rank.
        local_experts: number of experts of each rank.
        group: expert-parallel group; None: this rank has all experts, and nothing is sent.
        kept: which choices count (bool, tokens x choices), the others contribute zero; None: all.

    Collective: every rank of the group must call this, if there is one.
    """
    size, choices = 1 if group is None else dist.get_world_size(group), index.shape[-1]
    every = size * local_experts
    chosen = index.flatten() if kept is None else index.where(kept, every).flatten()  # choices that do not count, last
    sent = count_choices(chosen, every + 1)[:every]
    sorted_choices = torch.argsort(chosen, stable=True)
    if group is None:
        order = sorted_choices[: int(sent.sum())]
        outputs = compute(hidden[order // choices], chosen[order])
    else:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        to, source = torch.stack([sent, received]).view(2, size, local_experts).sum(2).tolist()
        order = sorted_choices[: sum(to)]
        rows = exchange_rows(hidden[order // choices], to, source, group)
        experts = (
            torch.arange(local_experts, device=index.device)
            .repeat(size)
            .repeat_interleave(received, output_size=sum(source))
        )
        outputs = exchange_rows(compute(rows, experts), source, to, group)
    weighted = outputs * weights.flatten()[order, None].to(outputs.dtype)
    # Each choice has a row, so that the sum has one order: atomic additions would let replicas of a rank differ.
    placed = hidden.new_zeros(index.numel(), hidden.shape[-1]).index_copy(0, order, weighted.to(hidden.dtype))
    return placed.view(*index.shape, -1).sum(1)


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends ``sent[r]`` rows to each rank ``r``, in order, and returns those received, in order of rank.

    Differentiable: the backward sends the gradients back.

    Collective: every rank of the group must call this, and its backward.
    """
    exchanged: torch.Tensor = _ExchangedRows.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Any:
        ctx.options = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent, received, group = ctx.options
        output = grads[0].new_empty(sum(received), *grads[0].shape[1:])
        dist.all_to_all_single(output, grads[0].contiguous(), received, sent, group=group)
        return output, None, None, None


@contextmanager
def _local(module: nn.Module, num_experts: int, scale: float) -> Iterator[list[torch.Tensor]]:
    """Context in which the module's own parameters are this rank's shards, whose gradients are scaled.

    ``num_experts`` counts this rank's experts within, and all of them outside, where a router may read it. Attributes
    of the instance come before parameters in its lookup.
    """
    local, every = {}, module.num_experts
    for name, parameter in module.named_parameters(recurse=False):
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local[name] = _ScaledGradient.apply(shard, scale)  # type: ignore[no-untyped-call]
    module.__dict__.update(local, num_experts=num_experts)
    try:
        yield list(local.values())
    finally:
        for name in local:
            del module.__dict__[name]
        module.__dict__["num_experts"] = every


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None


def _linked(rows: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Outputs for no rows, through which the backward still reaches the exchange and gives parameters gradients of 0.

    Otherwise the other ranks would wait in the backward for a rank whose experts received no tokens.
    """
    linked: torch.Tensor = _Linked.apply(rows, *parameters)  # type: ignore[no-untyped-call]
    return linked


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
