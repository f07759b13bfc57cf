"""The ``FullyShardedDataParallel`` wrapper (FSDP1) of a model: its arguments from the options."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_backends.core.option_parsing import BackwardPrefetch, ShardingLevel
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.outside_forward import Own
from accel_backends.fsdp.shard import shard_dtypes
from accel_backends.fsdp.wrap_units import Units
from accel_backends.ops.fqn import places
from accel_precision.policy import PrecisionPolicy
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel


def wrapper_arguments(
    root: nn.Module,
    units: Units,
    options: FSDPConfig,
    policy: PrecisionPolicy,
    *,
    degrees: tuple[int, int],
    mesh: "DeviceMesh",
    device: torch.device,
) -> dict[str, Any]:
    """Returns the arguments of the wrapper around ``root``; ``degrees``: replicas and shard degree of ``mesh``."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import CustomPolicy

    ids = {id(root.get_submodule(name)) for name in units.inside_out}
    dtypes = shard_dtypes(policy, options)
    prefetch = options.backward_prefetch
    given = {
        "param_dtype": dtypes.get("param_dtype"),
        "reduce_dtype": dtypes.get("reduce_dtype"),
        "buffer_dtype": options.dtypes.get("buffer_dtype", policy.buffers),
    }
    mixed = fsdp.MixedPrecision(**given, cast_root_forward_inputs=dtypes.get("cast_forward_inputs", True))
    return {
        "device_mesh": mesh,
        "sharding_strategy": fsdp.ShardingStrategy[_strategy(options, degrees)],
        "auto_wrap_policy": CustomPolicy(lambda module: is_unit(module, ids)),
        # With a MixedPrecision, even one without dtypes, torch computes batch normalisations in fp32.
        "mixed_precision": mixed if any(given.values()) else None,
        # A model that trains on the CPU is in host memory already.
        "cpu_offload": fsdp.CPUOffload(offload_params=bool(options.cpu_offload) and device.type != "cpu"),
        "backward_prefetch": None
        if prefetch is BackwardPrefetch.NO_PREFETCH
        else fsdp.BackwardPrefetch[(prefetch or BackwardPrefetch.BACKWARD_PRE).name],
        "forward_prefetch": bool(options.forward_prefetch),
        "limit_all_gathers": options.limit_all_gathers,
        "use_orig_params": True,
        "ignored_modules": [root.get_submodule(name) for name in units.ignored] or None,
        "device_id": device,
    }


def _strategy(options: FSDPConfig, degrees: tuple[int, int]) -> str:
    """Returns torch's name of the strategy, hybrid if the degrees are."""
    strategy = options.sharding_strategy
    replicated = degrees[0] > 1 and degrees[1] > 1
    if options.hybrid and not replicated:
        strategy = ShardingLevel.FULL_SHARD if strategy is ShardingLevel.HYBRID_SHARD else ShardingLevel.SHARD_GRAD_OP
    elif replicated and not options.hybrid:
        strategy = (
            ShardingLevel.HYBRID_SHARD if strategy is ShardingLevel.FULL_SHARD else ShardingLevel.HYBRID_SHARD_ZERO2
        )
    name: str = strategy.name
    return "_HYBRID_SHARD_ZERO2" if strategy is ShardingLevel.HYBRID_SHARD_ZERO2 else name


def check_trained(root: nn.Module, units: Units) -> None:
    """Checks that every unit has a parameter that trains, without which NO_SHARD loses the unit's parameters.

    torch restores them as parameters after the backward, which does not reach such a unit.

    Raises:
        PrepareError: names the unit.
    """
    seen = {id(parameter) for name in units.ignored for parameter in root.get_submodule(name).parameters()}
    for name in dict.fromkeys((*units.inside_out, "")):
        own = [parameter for parameter in root.get_submodule(name).parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        if own and not any(parameter.requires_grad for parameter in own):
            raise PrepareError(
                f"no parameter of {name or type(root).__name__} that is not in a unit of its own trains, and "
                "sharding_strategy='NO_SHARD' cannot save such a unit; nearest: strategy='ddp', which computes the "
                "same, or fsdp_version=2"
            )


def check_ignored(root: nn.Module, units: Units) -> None:
    """Checks that ignored modules do not train, because torch neither reduces their gradients nor has their norms.

    Raises:
        PrepareError: names a parameter that trains.
    """
    for name in units.ignored:
        for own, parameter in root.get_submodule(name).named_parameters():
            if parameter.requires_grad:
                raise PrepareError(
                    f"{name}.{own} trains, and {name} is among ignored_modules, whose gradients fsdp_version=1 does "
                    "not reduce: ranks would train different weights; nearest: fsdp_version=2, which averages them, "
                    "or freeze the module"
                )


def is_unit(module: nn.Module, ids: set[int]) -> bool:
    """Whether the module is a unit, or a unit in a wrapper of activation checkpointing, which FSDP wraps as one."""
    inner = module._modules.get("_checkpoint_wrapped_module")
    return id(inner) in ids if inner is not None else id(module) in ids


def outside_units(model: "FullyShardedDataParallel") -> list[Own]:
    """Returns the modules that are gathered with the root, each with a parameter of several dimensions."""
    if model._handle is None:
        return []
    flat: Any = model._handle.flat_param
    names = {id(place.module): place.prefix.removesuffix(".") for place in places(model)}
    found: dict[int, Own] = {}
    for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
        if len(shape) > 1 and (name := names[id(info.module)]):
            found.setdefault(id(info.module), Own(info.module, name, info.param_name))
    return list(found.values())


def first_names_of(model: nn.Module) -> dict[str, str]:
    """Maps each FQN of a parameter or buffer to the first FQN of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for place in places(model):
        for name, tensor in (*place.module._parameters.items(), *place.module._buffers.items()):
            if tensor is not None:
                names[place.prefix + name] = first.setdefault(id(tensor), place.prefix + name)
    return names
