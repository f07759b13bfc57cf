"""Sharding of a model in place with torch's ``fully_shard``, unit by unit."""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final
from weakref import ref

import torch
from torch import nn

from accel_backends.core.option_parsing import BackwardPrefetch
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.replicated_parameters import ReplicatedParameters
from accel_backends.fsdp.unreduced_gradients import drop_unreduced
from accel_backends.fsdp.unused_parameters import Usage
from accel_backends.fsdp.wrap_units import Units, find_units, stays_full
from accel_backends.ops.fqn import innermost, natural, places
from accel_backends.ops.meta_init import Made, make_empty, materialise
from accel_backends.parallel.expert_parallel import shard_placement
from accel_backends.private import full_parameter, is_within_backward, unit_parameters
from accel_precision.facts import HALVES
from accel_precision.fp8 import Follower
from accel_precision.policy import PrecisionPolicy
from accel_state.collectives.tensors import broadcast
from accel_state.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@final
@dataclass(frozen=True, slots=True)
class Sharder:
    """Arguments of sharding other than the model.

    Attributes:
        dtypes: arguments of torch's ``MixedPrecisionPolicy`` for the model, see ``shard_dtypes``.
        group: ranks that start from the same values.
        source_filled: rank 0 has values and broadcasts them to ranks whose parameters are on the meta device; otherwise
            every rank initialises its parameters, and rank 0's are broadcast.
        all_filled: every rank has values, so the caller is responsible for frozen ones of ignored modules.
        expert_mesh: mesh over which units of experts are sharded; None without expert parallelism.
    """

    config: FSDPConfig
    mesh: "DeviceMesh"
    device: torch.device
    dtypes: dict[str, Any]
    group: Any = None
    source_filled: bool = True
    all_filled: bool = True
    made: Made = field(default_factory=dict)
    expert_mesh: "DeviceMesh | None" = None

    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Allocates tensors that are on the meta device, and initialises them unless rank 0 broadcasts values."""
        materialise(
            modules,
            self.device,
            made=self.made,
            initialise=self.config.param_init_fn,
            values_follow=self.source_filled,
        )

    def send(self, tensors: list[torch.Tensor]) -> None:
        """Broadcasts rank 0's values, unless ``sync_module_states`` is off."""
        if self.config.sync_module_states:
            broadcast(tensors, group=self.group)


@final
class Sharded:
    """State of a sharded model that steps use.

    Holds weak references to modules: the root may be the key to this object, and torch's FSDP states lead from every
    unit to the root.

    Attributes:
        replicated: parameters that are not sharded; None if the user has sharded the model, and so averages them.
        follower: follower of fp8 scales, to be renewed after each step, see ``float8``.
        usage: finds parameters that no rank uses; None unless ``find_unused_parameters``.
    """

    __slots__ = ("_kept", "_synchronising", "_units", "follower", "replicated", "usage")

    def __init__(self, units: Iterable["FSDPModule"], replicated: ReplicatedParameters | None, *, freed: bool) -> None:
        self._units = [ref(unit) for unit in units]
        self._kept = [] if freed else self._units
        self.replicated = replicated
        self._synchronising = True
        self.follower: Follower | None = None
        self.usage: Usage | None = None

    @property
    def synchronising(self) -> bool:
        """Whether backward reduces gradients."""
        return self._synchronising

    @synchronising.setter
    def synchronising(self, enable: bool) -> None:
        self._synchronising = enable
        if self.replicated is not None:
            self.replicated.synchronising = enable

    @property
    def units(self) -> list["FSDPModule"]:
        """Units within the root, in the order of their names."""
        return _alive(self._units)

    @property
    def kept(self) -> list["FSDPModule"]:
        """Units that stay unsharded after forward."""
        return _alive(self._kept)


ShardedModels = MutableMapping[nn.Module, Sharded]
"""Sharded models by their innermost modules."""


def rest(sharded: ShardedModels, models: Iterable[nn.Module]) -> None:
    """Reshards those of the models that are sharded, before their parameters or states are read."""
    for model in models:
        root = innermost(model)
        found = sharded.get(root)
        if found is not None:
            reshard(root, found)


def reshard(root: nn.Module, sharded: Sharded) -> None:
    """Frees the full parameters that a forward without backward has left."""
    cast(Any, root).reshard()
    for unit in sharded.kept:
        unit.reshard()


def reshard_after_evaluation(root: nn.Module, *_: Any, sharded: Sharded) -> None:
    """Forward hook of a root that reshards it and its units where no backward will.

    Otherwise ``parameters()`` would be full copies until the next backward, and what is changed in them, values and
    ``requires_grad``, would be lost with them.
    """
    if not torch.is_grad_enabled():
        reshard(root, sharded)


def leave_backward(root: nn.Module) -> None:
    """Ends a backward that failed, and drops the unreduced gradients of its accumulation window.

    Otherwise torch takes the next backward for a part of it: the root's gradients are never reduced again, and what
    some units have got is added to the next step, whose ``zero_grad`` does not know it. torch before 2.13 cannot end
    it, so that the next forward is refused; another model can still be prepared, as after a smaller batch size.
    """
    if not is_within_backward(root):
        return
    if hasattr(root, "reset_iter_state"):
        drop_unreduced(root)
        cast(Any, root).reset_iter_state()
    else:
        root.register_forward_pre_hook(_refuse_after_failure, prepend=True)


def _refuse_after_failure(*_: Any) -> None:
    raise BackendError(
        f"a backward of this model failed, and fsdp_version=2 of torch {torch.__version__} cannot go on after it; "
        "nearest: build and prepare the model anew, or use torch 2.13 or newer"
    )


def gather_outside_inference_mode(root: nn.Module, *_: Any, sharded: Sharded) -> None:
    """Forward pre-hook of a root: in ``torch.inference_mode``, gathers units that were not gathered before, once.

    torch keeps the tensors that their first all-gather makes, and no later backward can use tensors of inference mode.
    """
    if not torch.is_inference_mode_enabled():
        return
    for unit in (cast("FSDPModule", root), *sharded.units):
        if any(full_parameter(entry) is None for entry in unit_parameters(cast(nn.Module, unit))):
            with torch.inference_mode(False), torch.no_grad():
                unit.unshard()
                unit.reshard()


def _alive(units: Iterable["ref[FSDPModule]"]) -> list["FSDPModule"]:
    return [unit for one in units if (unit := one()) is not None]


def shard_dtypes(policy: PrecisionPolicy, config: FSDPConfig | None = None) -> dict[str, Any]:
    """Returns the arguments of torch's ``MixedPrecisionPolicy`` for a precision.

    Units compute in the policy's compute dtype, gradients are reduced in its ``reduce`` dtype or in the parameters'
    own, and the root's outputs have its ``output`` dtype. Dtypes of the options take precedence; ``config`` None: there
    are none.
    """
    dtypes: dict[str, Any] = {"reduce_dtype": policy.reduce, "output_dtype": policy.output}
    if policy.compute is not None:
        dtypes["param_dtype"] = policy.compute
        if policy.autocast and policy.reduce is None:
            dtypes["reduce_dtype"] = policy.params or torch.float32
    if config is not None:
        dtypes |= {name: value for name, value in config.dtypes.items() if name != "buffer_dtype"}
    return {name: value for name, value in dtypes.items() if value is not None}


def computes_in_halves(dtypes: dict[str, Any]) -> bool:
    """Whether units compute in fp16 or bf16."""
    return dtypes.get("param_dtype") in HALVES


def units_of(model: nn.Module, policy: PrecisionPolicy, config: FSDPConfig, *, experts: Sequence[str] = ()) -> Units:
    """Returns the units of a model under a precision, see ``wrap_units.find_units``."""
    return find_units(model, config, halves=computes_in_halves(shard_dtypes(policy, config)), experts=experts)


def shard_model(model: nn.Module, units: Units, how: Sharder) -> Sharded:
    """Shards ``model`` in place and returns the state that steps use.

    For each unit, its parameters are moved to the device, overwritten with rank 0's values and sharded, and the full
    parameters are freed, so that the device never holds more than one full unit.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    named = {name: model.get_submodule(name) for name in (*units.inside_out, *units.ignored)}
    how.fill(module for module in model.modules() if any(map(stays_full, module.parameters(recurse=False))))
    for name in units.ignored:
        how.fill(named[name].modules())
        _move(named[name], how.device)
    ignored = {parameter for name in units.ignored for parameter in named[name].parameters()}
    full = [p for p in model.parameters() if stays_full(p) and p not in ignored]
    for parameter in full:
        parameter.data = parameter.data.to(how.device)
    apart = ignored | set(full)
    for name in units.inside_out:
        mesh = how.expert_mesh if name in units.experts else None
        _shard_unit(named[name], how, apart, wide=name in units.wide, experts=mesh)
    _shard_unit(model, how, apart, root=True)
    replicated = [parameter for parameter in model.parameters() if parameter in ignored]
    how.send([*full, *(p for p in replicated if p.requires_grad or not how.all_filled), *model.buffers()])
    averaged = ReplicatedParameters([*full, *replicated], how.group, dist.get_world_size(how.group))
    sharded = adopt(model, averaged, freed=how.config.reshard is True)
    if how.config.find_unused_parameters:
        find_unused(model, sharded)
    set_prefetch([cast(FSDPModule, named[name]) for name in sorted(units.blocks, key=natural)], model, how.config)
    return sharded


def adopt(model: nn.Module, replicated: ReplicatedParameters | None = None, *, freed: bool = False) -> Sharded:
    """Returns the step state of a model that is sharded; ``freed``: its units free their parameters after forward."""
    from torch.distributed.fsdp import FSDPModule

    units: list[FSDPModule] = [
        module for module in model.modules() if isinstance(module, FSDPModule) and module is not model
    ]
    return Sharded(units, replicated, freed=freed)


def find_unused(model: nn.Module, sharded: Sharded) -> None:
    """Makes units reduce parameters that this rank did not use, and records parameters that no rank used."""
    cast("FSDPModule", model).set_reduce_scatter_unused_params(True)
    sharded.usage = Usage()


@contextmanager
def synchronising(model: nn.Module, sharded: Sharded, enable: bool) -> Iterator[None]:
    """Context in which backward reduces gradients, or leaves them unreduced."""
    before = sharded.synchronising
    _synchronise(model, sharded, enable)
    try:
        yield
    finally:
        _synchronise(model, sharded, before)


def _synchronise(model: nn.Module, sharded: Sharded, enable: bool) -> None:
    sharded.synchronising = enable
    cast(Any, model).set_requires_gradient_sync(enable, recurse=False)
    for unit in sharded.units:
        unit.set_requires_gradient_sync(enable, recurse=False)


def set_prefetch(blocks: list["FSDPModule"], model: nn.Module, config: FSDPConfig) -> None:
    """Sets which units each unit all-gathers ahead of time."""
    ahead = config.forward_prefetch
    for position, block in enumerate(blocks):
        if ahead:
            block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 1 + ahead])
    if config.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])  # itself: nothing left to prefetch


def _shard_unit(
    module: nn.Module,
    how: Sharder,
    apart: set[nn.Parameter],
    *,
    root: bool = False,
    wide: bool = False,
    experts: "DeviceMesh | None" = None,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    given = {parameter for parameter in module.parameters() if not parameter.is_meta}
    how.fill(module.modules())
    fresh = [p for p in module.parameters() if not isinstance(p, DTensor) and p not in apart]
    for parameter in fresh:
        parameter.data = parameter.data.to(how.device)
        if not parameter.is_contiguous():  # as those of ``channels_last``, which torch does not shard
            parameter.data = parameter.data.contiguous()
        how.send([parameter.data])  # one by one, so that no buffer holds a copy of the unit
    reshard, placement = how.config.reshard, None
    if experts is not None:  # these ranks are fewer than those that a number of ``reshard_after_forward`` divides
        reshard, placement = bool(reshard), shard_placement(experts["dp_shard"].size())
    pinned = how.device.type != "cpu" if how.config.pin_memory is None else how.config.pin_memory
    fully_shard(
        module,
        mesh=how.mesh if experts is None else experts,
        reshard_after_forward=None if root and reshard else reshard,
        mp_policy=MixedPrecisionPolicy(**_unit_dtypes(how.dtypes, root=root, wide=wide)),
        offload_policy=CPUOffloadPolicy(pin_memory=pinned) if how.config.cpu_offload else OffloadPolicy(),
        ignored_params=apart or None,
        shard_placement_fn=placement,
    )
    _keep_scales(module)
    for parameter in fresh:
        if parameter not in given:
            # Threads of the collectives keep references to sent tensors for a while; this frees the memory at once.
            parameter.data.untyped_storage().resize_(0)
        make_empty(parameter)


def _keep_scales(module: nn.Module) -> None:
    """Gives the shard of a 4-bit weight of bitsandbytes the scales of the layer, from where state dicts have them."""
    layer: Any
    for layer in module.modules():
        scales = getattr(layer, "quant_state", None)
        if scales is not None and getattr(layer.weight, "quant_state", None) is None:
            layer.weight.quant_state = scales


def _unit_dtypes(dtypes: dict[str, Any], *, root: bool, wide: bool) -> dict[str, Any]:
    """Returns a unit's dtypes: only the root converts outputs, and ``wide`` units compute in full precision."""
    chosen = dict(dtypes)
    if not root:
        chosen.pop("output_dtype", None)
    if wide:
        chosen.pop("param_dtype", None)
        chosen["cast_forward_inputs"] = False
    return chosen


def check_torch(config: FSDPConfig) -> None:
    """Refuses options that the installed torch does not support.

    Raises:
        ConfigError: with the torch version that supports them.
    """
    from torch.distributed.fsdp import FSDPModule

    if config.find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"find_unused_parameters=True needs torch 2.13 or newer with FSDP2, and this is {torch.__version__}; "
            "nearest: leave it out and use all parameters in every step, or strategy='ddp'"
        )


def _move(module: nn.Module, device: torch.device) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(device)


def replace_modules(model: nn.Module, replacements: dict[int, nn.Module]) -> None:
    """Replaces modules by id, in every place in the model where they are used."""
    for place in list(places(model)):
        for name, child in list(place.module._modules.items()):
            if child is not None and id(child) in replacements:
                place.module._modules[name] = replacements[id(child)]
