"""Checks of models and optimizers before sharding changes anything."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel_backends.core.rank_comparison import check_same
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.wrap_units import Units, parameters_of_units, stays_full
from accel_backends.ops.fqn import innermost, named_parameters, sparse_embeddings, wrapped_name
from accel_backends.ops.meta_init import is_meta
from accel_backends.ops.optimizer_support import BEYOND_ELEMENTS, FUSED_ON_FULL, beyond_elements, check_state
from accel_backends.private import accumulation_hooks
from accel_precision.policy import dtype_name
from accel_state.errors import PrepareError
from accel_state.pytree.composite import is_composite

# Packages with optimizers that step on a GPU only.
_ON_DEVICE_ONLY = ("apex", "bitsandbytes")
_OF_VERSION = {2: "fsdp", 1: "fsdp1"}


def check_model(
    model: nn.Module, units: Units, *, upcast: bool, version: int, converted: Collection[torch.dtype | None] = ()
) -> None:
    """Refuses a model that FSDP of a version cannot shard.

    Args:
        upcast: whether trainable half-precision parameters are widened to fp32 first.
        converted: dtypes to which the precision converts floating-point parameters, the last one in each forward;
            None among them: it does not.

    Raises:
        PrepareError: the model is wrapped in DDP or FSDP1, partly sharded, has quantized weights that cannot be
            sharded or that the precision would convert, integers that torch cannot shard, or a unit's parameters have
            several dtypes.
    """
    kind = type(innermost(model)).__name__
    layer: nn.Module | None = model
    while layer is not None:
        if isinstance(layer, DistributedDataParallel):
            raise PrepareError(f"{kind} is wrapped in DistributedDataParallel already; give prepare the bare model")
        if "_fsdp_wrapped_module" in layer._modules:
            raise PrepareError(
                f"{kind} is wrapped in FullyShardedDataParallel (version 1) already; give prepare the bare model, or "
                "use fsdp_version=1"
            )
        name = wrapped_name(layer)
        layer = None if name is None else layer._modules[name]
    parts = [name for name, module in innermost(model).named_modules() if name and is_sharded(module)]
    if parts:
        raise PrepareError(
            f"{parts[0]} of this {kind} is sharded already (fully_shard), and the whole is not; give prepare the bare "
            "model, or shard all of it yourself"
        )
    _check_layouts(model, units)
    _check_packed(model, units, converted)
    _check_integers(model, units, version)
    _check_dtypes(model, units, upcast=upcast)


def _check_layouts(model: nn.Module, units: Units) -> None:
    """Refuses quantized weights that a shard would not describe.

    Those of torchao consist of several tensors, unless their class says how they are gathered; 8-bit layers of
    bitsandbytes compute with attributes of the weight, which shards do not have, and 4-bit ones with scales of the
    layer.
    """
    for name, parameter in _sharded_parameters(model, units):
        gathers = hasattr(parameter, "fsdp_pre_all_gather")
        kind, package = type(parameter).__name__, type(parameter).__module__.partition(".")[0]
        if _of_4bit(parameter) and getattr(parameter, "quant_state", None) is None:
            raise PrepareError(
                f"{name} of {type(innermost(model)).__name__} is {kind} of {package} without scales: it was never "
                "quantized; load it on every rank before prepare, by load_and_quantize_model"
            )
        if (is_composite(parameter) and not gathers) or hasattr(parameter, "SCB"):
            raise PrepareError(
                f"{name} of {type(innermost(model)).__name__} is an {kind} of {package}, which cannot be cut into "
                f"shards; nearest: ignored_modules with {_not_sharded(name)}"
            )


def _check_packed(model: nn.Module, units: Units, converted: Collection[torch.dtype | None]) -> None:
    """Refuses 4-bit weights in bytes of floating-point numbers, which the precision would convert like numbers."""
    to = [dtype for dtype in dict.fromkeys(converted) if dtype is not None]
    for name, parameter in _sharded_parameters(model, units):
        if _of_4bit(parameter) and parameter.is_floating_point() and any(dtype != parameter.dtype for dtype in to):
            raise PrepareError(
                f"{name} of {type(innermost(model)).__name__} has 4-bit weights stored as {parameter.dtype}, which the "
                f"precision would convert to {' and '.join(map(str, to))} and so destroy; nearest: "
                f"bnb_4bit_quant_storage={f'{to[0]}, or ' if len(to) == 1 else ''}torch.uint8"
            )


def _check_integers(model: nn.Module, units: Units, version: int) -> None:
    """Refuses integers in the flat parameters of version 1, and where version 2 makes shards require gradients."""
    if version == 2 and shards_integers():
        return
    for name, parameter in _sharded_parameters(model, units):
        if parameter.is_floating_point() or parameter.is_complex():
            continue
        newer = "fsdp_version=2, which shards 4-bit weights; " if _of_4bit(parameter) else "fsdp_version=2; "
        reason, other = (
            ("flat parameters of fsdp_version=1 take", newer if shards_integers() else "")
            if version == 1
            else (f"fully_shard of torch {torch.__version__} takes", "torch 2.13; ")
        )
        raise PrepareError(
            f"{name} of {type(innermost(model)).__name__} is {dtype_name(parameter.dtype)}, and {reason} "
            f"floating-point numbers only; nearest: {other}ignored_modules with {_not_sharded(name)}"
        )


def shards_integers() -> bool:
    """Whether ``fully_shard`` takes parameters that cannot require gradients, as that of torch 2.13 does.

    That of torch 2.9 makes each shard require gradients first, and fails within the model. The method that tells the
    versions apart here came with torch 2.13.
    """
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _of_4bit(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "quant_state")


def _not_sharded(name: str) -> str:
    return (
        f"{name.rpartition('.')[0]!r} and its like, which stay full on each rank while the rest is sharded, or "
        "strategy='ddp'"
    )


def check_hooks(model: nn.Module, units: Units, *, version: int) -> None:
    """Refuses parameter hooks that sharding would drop; version 2 keeps post-accumulate-grad hooks.

    Raises:
        PrepareError: with the parameter's name and the supported hook.
    """
    kind = type(innermost(model)).__name__
    parameter: Any
    for name, parameter in _sharded_parameters(model, units):
        if version == 2 and stays_full(parameter):
            continue
        if parameter._backward_hooks or (version == 1 and accumulation_hooks(parameter)):
            kept = "register_post_accumulate_grad_hook"
            nearest = kept if version == 2 else f"fsdp_version=2 with {kept}"
            raise PrepareError(
                f"{name} of {kind} has hooks, which fsdp_version={version} would never call, because backward brings "
                f"gradients to other tensors; nearest: {nearest}, whose hooks are called with the averaged shard, or "
                "strategy='ddp'"
            )


def check_gradients(model: nn.Module, units: Units) -> None:
    """Refuses embeddings with sparse gradients, which cannot be sharded.

    Raises:
        PrepareError: with the embedding's name.
    """
    inner = innermost(model)
    left_out = {module for name in units.ignored for module in inner.get_submodule(name).modules()}
    for name, module in sparse_embeddings(inner):
        if module not in left_out:
            raise PrepareError(
                f"{name} of {type(inner).__name__} is an {type(module).__name__} with sparse=True, whose gradients "
                "cannot be cut into shards; nearest: sparse=False, or strategy='ddp'"
            )


def check_dimensions(model: nn.Module, units: Units) -> None:
    """Refuses parameters without dimensions, which FSDP1 cannot flatten, and without elements, whose state it loses.

    Raises:
        PrepareError: with the parameter's name.
    """
    for name, parameter in _sharded_parameters(model, units):
        if parameter.dim() == 0:
            raise PrepareError(
                f"{name} of {type(innermost(model)).__name__} has no dimension, and fsdp_version=1 takes parameters of "
                "one at least; nearest: nn.Parameter(torch.tensor([value])), or fsdp_version=2"
            )
        if parameter.requires_grad and not parameter.numel():
            raise PrepareError(
                f"{name} of {type(innermost(model)).__name__} trains and has no elements, and fsdp_version=1 cannot "
                "save the state of its optimizer; nearest: requires_grad_(False), or fsdp_version=2"
            )


def check_flattened(optimizers: Iterable[Optimizer], sharded: Mapping[int, nn.Parameter], shards: int) -> None:
    """Refuses LBFGS, which flattens parameters, for parameters that do not divide into equal shards.

    Raises:
        PrepareError: with the shape of the first such parameter.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in sharded):
            if parameter.shape[0] % shards:
                raise PrepareError(
                    f"LBFGS flattens its parameters, and one of shape {tuple(parameter.shape)} is cut into {shards} "
                    "shards of different sizes, which torch cannot flatten; nearest: sizes that divide, AdamW, or "
                    "strategy='ddp'"
                )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def check_separate(models: Sequence[nn.Module]) -> None:
    """Refuses parameters that several models share, because each parameter is gathered by one root.

    Raises:
        PrepareError: with both names.
    """
    owners: dict[int, str] = {}
    for position, model in enumerate(models):
        for name, parameter in named_parameters(model).items():
            mine = f"{name} of model {position}"
            if id(parameter) in owners:
                raise PrepareError(
                    f"{mine} is also {owners[id(parameter)]}; a sharded parameter belongs to one model. Put both "
                    "models into one nn.Module and prepare that"
                )
            owners[id(parameter)] = mine


def check_optimizers(optimizers: Iterable[Optimizer], config: FSDPConfig, sharded: Mapping[int, Any]) -> None:
    """Refuses optimizers that cannot step on shards.

    Args:
        sharded: by id, the parameters that will be sharded.

    Raises:
        PrepareError: an optimizer that steps on a GPU only, with offloaded parameters; one that cannot step on shards;
            one with state that cannot be sharded like its parameter; a fused one with sharded and unsharded parameters
            in one group, or, with version 2, a fused one other than Adam and AdamW.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        _check_elementwise(optimizer, cast(int, config.fsdp_version), sharded)
        if config.cpu_offload:
            _check_offloaded(optimizer, kind)
        for number, group in enumerate(optimizer.param_groups):
            split = {id(parameter) in sharded for parameter in group["params"]}
            if (
                group.get("fused")
                and True in split
                and config.fsdp_version == 2
                and isinstance(optimizer, FUSED_ON_FULL)
            ):
                raise PrepareError(
                    f"{kind}(fused=True): torch {torch.__version__.partition('+')[0]} has no fused step of {kind} for "
                    "the shards of fsdp_version=2, only those of Adam and AdamW; nearest: foreach=True"
                )
            if len(split) > 1 and group.get("fused"):
                raise PrepareError(
                    f"group {number} of {kind} is fused and has both parameters that are sharded and ones that are not "
                    "(without dimension or elements, or ignored); put those into a group of their own"
                )
            for parameter in group["params"]:
                if id(parameter) in sharded:
                    check_state(kind, parameter, optimizer.state.get(parameter, {}))


def check_sources(filled: Sequence[bool], *, synchronised: bool) -> None:
    """Refuses models on the meta device that would not receive values.

    Args:
        filled: whether each rank's parameters have values.

    Raises:
        PrepareError: rank 0 has no values while other ranks do, or rank 0's values are not broadcast.
    """
    if any(filled) and not filled[0]:
        raise PrepareError(
            f"rank 0 has its model on the meta device, and ranks {[r for r, full in enumerate(filled) if full]} have "
            "values; values are taken from rank 0, so build it there"
        )
    if not all(filled) and not synchronised:
        raise PrepareError(
            "models on the meta device get rank 0's values, which sync_module_states=False forbids; leave it on"
        )


def compare_ranks(
    models: Sequence[nn.Module], units_of: Callable[[nn.Module], Units], *, synchronised: bool, group: Any
) -> list[bool]:
    """Returns whether each rank's models have values; refuses ranks that would shard different units.

    Collective: every rank of the group must call this.

    Args:
        synchronised: rank 0's values are broadcast.

    Raises:
        PrepareError: see ``check_same`` and ``check_sources``.
    """
    from accel_state.collectives.objects import all_gather_object

    mine = [f"unit {name}" for model in models for name in units_of(model).inside_out]
    everybody = all_gather_object((mine, not any(map(is_meta, models))), group=group)
    check_same([entries for entries, _ in everybody])
    filled = [having for _, having in everybody]
    check_sources(filled, synchronised=synchronised)
    return filled


def _sharded_parameters(model: nn.Module, units: Units) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of all units by FQN, tied parameters under their first name."""
    parameters = named_parameters(model)
    for names in parameters_of_units(model, units).values():
        yield from ((name, parameters[name]) for name in names if name in parameters)


def _check_dtypes(model: nn.Module, units: Units, *, upcast: bool) -> None:
    parameters = named_parameters(model)
    for unit, names in parameters_of_units(model, units).items():
        first: dict[torch.dtype, str] = {}
        for name in names:
            parameter = parameters.get(name)
            if parameter is None or not parameter.requires_grad or parameter.dim() == 0:
                continue
            dtype = torch.float32 if upcast and parameter.dtype.itemsize == 2 else parameter.dtype
            first.setdefault(dtype, name)
        if len(first) > 1:
            listed = ", ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in first.items())
            raise PrepareError(
                f"parameters that train in one unit ({unit or 'the root'}) have several dtypes: {listed}. Convert the "
                "model to one dtype, or give a precision that does (bf16: parameters in fp32)"
            )


def _check_offloaded(optimizer: Optimizer, kind: str) -> None:
    package = type(optimizer).__module__.partition(".")[0]
    if package in _ON_DEVICE_ONLY:
        raise PrepareError(
            f"{kind} of {package} steps on the device only, and cpu_offload=True keeps parameters on the host; use one "
            "of torch.optim, or cpu_offload=False"
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise PrepareError(
            f"{kind}(capturable=True) keeps its state on the device, and cpu_offload=True keeps parameters on the "
            "host; use capturable=False, or cpu_offload=False"
        )


def _check_elementwise(optimizer: Optimizer, version: int, sharded: Mapping[int, Any]) -> None:
    kind = beyond_elements(optimizer, _OF_VERSION[version])
    if kind is None or not any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
        return
    other = 3 - version
    nearest = f", or fsdp_version={other}" if kind not in BEYOND_ELEMENTS[_OF_VERSION[other]] else ""
    raise PrepareError(
        f"{kind} looks at full parameters, and torch {torch.__version__.partition('+')[0]} does not let it with "
        f"fsdp_version={version}, which leaves every rank a part of each; nearest: AdamW{nearest}, or strategy='ddp'"
    )
