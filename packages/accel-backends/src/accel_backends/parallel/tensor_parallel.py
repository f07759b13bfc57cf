"""Tensor parallelism: the matrices of a model's layers are sharded over the ranks of one mesh axis."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from accel_backends.parallel.derive import derive_plan
from accel_backends.parallel.expert_parallel import find_experts
from accel_backends.parallel.plan import StyleChoice, TensorParallelPlan, model_plan
from accel_backends.parallel.styles import STYLES, Style
from accel_state.errors import PrepareError


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan | Mapping[str, Any] | str = "derive",
    *,
    src_data_rank: int | None = 0,
) -> TensorParallelPlan:
    """Shards a model's layers over the ranks of ``mesh`` in place, and returns the plan that was applied.

    All ranks of the mesh must receive the same inputs and, where replicated modules draw random numbers (dropout), have
    the same generator states. Sharded parameters become DTensors, whose full tensors are those of one process, under
    the same names; the others stay plain tensors, whose gradients are the same on every rank, because their inputs
    are. Tied parameters stay tied. Optimizers that hold the model's parameters have to be rebound.

    The method is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), with one all-reduce in the forward and
    one in the backward of each pair of layers.

    Args:
        model: a model that is not wrapped, on the device of the mesh or on the meta device.
        mesh: mesh with one axis.
        plan: mapping from patterns of module names to styles (see ``STYLES``); ``"model"``, the model's own
            ``tp_plan``; ``"derive"``, a plan from the model's structure.
        src_data_rank: rank of the mesh whose values all ranks start from; None: each rank keeps its own values, which
            have to be equal.

    Raises:
        PrepareError: on every rank and before any change, where the plan does not fit the model or the mesh.

    Collective: every rank of the mesh must call this.
    """
    if mesh.ndim != 1:
        raise PrepareError(
            f"tensor parallelism over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}; nearest: mesh['tp'], its "
            "one axis"
        )
    chosen, places = _checked(model, mesh.size(), plan)
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, choice in places:
        if isinstance(choice.style, ParallelStyle):
            parallelize_module(module, mesh, choice.style, src_data_rank=src_data_rank)
            continue
        for own, placement in choice.style.placements(module).items():
            module.register_parameter(own, _shard(module, own, placement, mesh, shards, src_data_rank))
        choice.style.install(module, mesh)
    if src_data_rank is not None:
        _broadcast_replicas(model, mesh, src_data_rank)
    return chosen


def check_tensor_parallel(
    model: nn.Module,
    size: int,
    plan: TensorParallelPlan | Mapping[str, Any] | str,
    *,
    divided: Collection[str] = (),
) -> None:
    """Refuses a model or plan that ``size`` tensor-parallel ranks cannot compute; without communication.

    ``divided``: names of the modules whose experts expert parallelism divides, which a plan has to leave out.

    Raises:
        PrepareError: names the module, or the entry of the plan.
    """
    for name, _, choice in plan_for(model, size, plan).modules(model) if divided else ():
        if name in divided and choice.style != STYLES["replicate"]:
            raise PrepareError(
                f"the tensor-parallel plan gives {choice.pattern} a style, and ep_size divides the experts of {name} "
                "among ranks; nearest: leave it out of the plan, or ep_size=1"
            )
    _checked(model, size, plan)


def plan_for(model: nn.Module, size: int, plan: TensorParallelPlan | Mapping[str, Any] | str) -> TensorParallelPlan:
    """Plan of a model for ``size`` ranks, from what a caller may give; see ``apply_tensor_parallel``."""
    if isinstance(plan, TensorParallelPlan):
        return plan
    if isinstance(plan, Mapping):
        return TensorParallelPlan.parse(plan)
    if plan == "model":
        return model_plan(model)
    if plan == "derive":
        return derive_plan(model, size)
    raise PrepareError(f'no tensor-parallel plan {plan!r}; expected "derive", "model" or a mapping from patterns')


def _checked(
    model: nn.Module, size: int, given: TensorParallelPlan | Mapping[str, Any] | str
) -> tuple[TensorParallelPlan, list[tuple[str, nn.Module, StyleChoice]]]:
    """The plan, and modules with their choices, after every check that needs no communication."""
    plan = plan_for(model, size, given)
    experts = {id(one) for module in find_experts(model).values() for one in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in experts:
            raise PrepareError(
                f"{name} is a DTensor already, with placements {parameter.placements}; tensor parallelism comes first, "
                "before fully_shard, and once"
            )
    places = plan.modules(model)
    if given == "derive" and size > 1 and all(choice.style == STYLES["replicate"] for *_, choice in places):
        raise PrepareError(
            f"{type(model).__name__} has no attention, feed-forward network, embedding or head that plan='derive' "
            f"knows and {size} tensor-parallel ranks divide, so every rank would compute all of it; nearest: "
            "TorchTensorParallelConfig(plan={...}) with the names of its layers, or tp_size=1"
        )
    for name, module, choice in places:
        if isinstance(choice.style, Style):
            choice.style.check(module, name, size)
    _check_ties(model, places)
    return plan, places


def _check_ties(model: nn.Module, places: list[tuple[str, nn.Module, StyleChoice]]) -> None:
    """Refuses plans that would give one tied parameter two placements, or a placement in only one of its modules."""
    planned: dict[str, Placement | str] = {}
    for name, module, choice in places:
        for own, placement in _planned(module, choice).items():
            full = f"{name}.{own}" if name else own
            if full in planned:
                raise PrepareError(
                    f"two entries of the tensor-parallel plan place {full}: {planned[full]}, and {placement} by the "
                    f"pattern {choice.pattern!r}; leave one of them out"
                )
            planned[full] = placement
    tied: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(name)
    for names in tied.values():
        found = {planned.get(name) for name in names}
        unknown = any(isinstance(placement, str) for placement in found)
        if len(names) > 1 and (unknown or len(found) > 1):
            told = "; ".join(f"{name}: {planned.get(name, 'replicated')}" for name in names)
            raise PrepareError(
                f"{' and '.join(names)} are one tied parameter, which the plan would place in different ways ({told}); "
                'nearest: "embedding_rowwise" for the embedding and "colwise_gather_output" for the head'
            )


def _planned(module: nn.Module, choice: StyleChoice) -> Mapping[str, Placement | str]:
    """Placements of a module's parameters; those of a torch style are unknown, and stand as its name."""
    if isinstance(choice.style, Style):
        return choice.style.placements(module)
    return {name: type(choice.style).__name__ for name, _ in module.named_parameters(remove_duplicate=False)}


def _shard(
    module: nn.Module,
    own: str,
    placement: Placement,
    mesh: DeviceMesh,
    shards: dict[nn.Parameter, nn.Parameter],
    src_data_rank: int | None,
) -> nn.Parameter:
    """Sharded parameter in place of one of the module's own; the same one for tied parameters."""
    full = module._parameters[own]
    assert full is not None
    if full not in shards:
        placed = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=src_data_rank)
        shards[full] = nn.Parameter(placed, requires_grad=full.requires_grad)
    return shards[full]


def _broadcast_replicas(model: nn.Module, mesh: DeviceMesh, source: int) -> None:
    """Makes the plain parameters and the buffers of all ranks equal to those of one rank."""
    group = mesh.get_group()
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            with torch.no_grad():
                dist.broadcast(tensor.detach(), group=group, group_src=source)
