"""Backend that shards parameters, gradients and optimizer states with torch's ``fully_shard`` (FSDP2)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.replaced import replace_parameters
from accel_backends.core.run import Run
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.float8 import follow
from accel_backends.fsdp.gradients import DTensorGradients
from accel_backends.fsdp.mesh import MeshLayout, ShardingMesh
from accel_backends.fsdp.outside_forward import explained, outside_units, refuse_outside
from accel_backends.fsdp.shard import (
    Sharded,
    Sharder,
    adopt,
    check_torch,
    find_unused,
    gather_outside_inference_mode,
    leave_backward,
    reshard,
    reshard_after_evaluation,
    shard_dtypes,
    shard_model,
    synchronising,
    units_of,
)
from accel_backends.fsdp.states import DTensorStates, take_full_tensors
from accel_backends.fsdp.unit_record import watch_units
from accel_backends.fsdp.validate import (
    check_flattened,
    check_gradients,
    check_hooks,
    check_model,
    check_optimizers,
    check_separate,
    compare_ranks,
    is_sharded,
)
from accel_backends.fsdp.wrap_units import Units, parameters_to_split, stays_full
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.copying import refuse_copies
from accel_backends.ops.dtensor import is_dtensor, loop_over_meshes, placed_like
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.master_weights import upcast_parameters, upcasts
from accel_backends.ops.meta_init import check_initialisers, drop_values, is_meta
from accel_backends.ops.optimizer_support import check_on_shards, holds_any
from accel_backends.parallel.axes import ModelAxes
from accel_backends.parallel.common_calls import CommonCalls
from accel_backends.roles.gradients import NOTHING
from accel_precision.autocast import cast_parameters
from accel_state.logging import get_logger
from accel_state.private import untraced

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_log = get_logger(__name__)


@final
class FSDPBackend(ModuleBackend):
    """Shards models in place, unit by unit; a prepared model is the user's own object, with DTensors as parameters.

    The precision is built into ``fully_shard``: parameters are all-gathered in the policy's compute dtype, outputs are
    converted to its output dtype, and autocast is not used. Works over any collective backend, on CPUs as on GPUs, also
    with one process.
    """

    name: ClassVar[str] = "fsdp"
    Config: ClassVar[type[BackendConfig]] = FSDPConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        sharded=True, gathers_fp8=True, offload=True, meta_device=True, loads_in_place=True
    )
    named_options: ClassVar[Mapping[str, Any]] = {"fsdp_version": 2}
    distributed_type: ClassVar[str] = "FSDP"

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        self._options = cast(FSDPConfig, self.config).of_version(2, "fsdp1")
        check_torch(self._options)
        self._spread = ShardingMesh(self.session, self._options, run.parallelism)
        shards = self._spread.expert_shards
        self._axes = ModelAxes(run, self._spread.axis, shards=shards)
        self._source_filled = True
        self._all_filled = True
        self._dropping = False
        self._sharded: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()
        self._released: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()
        self._outside: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self.layout = MeshLayout(run, self._spread, self._axes)
        self.gradients = DTensorGradients(self, self._sharded)
        self.states = DTensorStates(self, self._sharded, self._spread)

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses models and optimizers that cannot be sharded, see ``wrap_units.find_units`` and ``validate``."""
        if not bundle.training:
            return
        check_separate(bundle.models)
        converted = (self.policy.params, shard_dtypes(self.policy, self._options).get("param_dtype"))
        for model in bundle.models:
            if is_sharded(innermost(model)):
                continue
            if self.session.rank == 0 and is_meta(model):
                check_initialisers(innermost(model), self._options.param_init_fn)
            units = self._units(model)
            check_model(model, units, upcast=upcasts(self.policy), version=2, converted=converted)
            check_hooks(model, units, version=2)
            self._axes.check(innermost(model))
            check_gradients(model, units)
        splitting = self._splitting([*bundle.models, *self._sharded])
        check_optimizers(bundle.optimizers, self._options, splitting)
        check_flattened(bundle.optimizers, splitting, self.layout.degrees[1])

    def bind(self, bundle: Bundle) -> Bundle:
        """As every backend, after all ranks have verified that they prepare the same."""
        config = self._options
        if bundle.training and self.session.world_size > 1:
            replicated = [model for model in bundle.models if not is_sharded(innermost(model))]
            group = self.session.group
            filled = compare_ranks(replicated, self._units, synchronised=config.sync_module_states, group=group)
            self._source_filled = filled[0]
            self._all_filled = all(filled) and not config.cpu_ram_efficient_loading
            self._dropping = config.cpu_ram_efficient_loading and self._source_filled and self.session.rank > 0
        elif bundle.training:
            self._source_filled = self._all_filled = not any(map(is_meta, bundle.models))
            self._dropping = False
        if bundle.training:
            splitting = self._splitting([*bundle.models, *self._sharded])
            tried = [one for one in bundle.optimizers if holds_any(one, splitting)]
            check_on_shards(tried, self._spread.mesh, offload=bool(config.cpu_offload))
        bound = super().bind(bundle)
        for optimizer in bundle.optimizers:
            loop_over_meshes(optimizer)
        return bound

    @property
    def gathers_fp8(self) -> bool:
        """False if parameters are resharded to a smaller shard degree after forward, which torch lacks for fp8."""
        return isinstance(self._options.reshard, bool)

    def blocks(self, model: nn.Module) -> Sequence[str]:
        """Returns the names of the units that are repeated blocks."""
        return self._units(model).blocks

    def ready(self, model: nn.Module, *, placed: bool, training: bool) -> nn.Module:
        """Shards a model that trains, precision included; a model that is only evaluated stays unsharded."""
        return self.wrap(model) if training else super().ready(model, placed=placed, training=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shards the model in place and returns it; a model that the user has sharded already is left as it is."""
        root = innermost(model)
        if is_sharded(root):
            self._sharded[root] = known = self._released.pop(root, None) or adopt(root)
            if self._options.find_unused_parameters and known.usage is None:
                find_unused(root, known)
            return model
        given, kind = named_parameters(root), type(root).__name__
        if self._dropping:
            drop_values(root)
        units = self._units(model)
        if units.tied:
            _log.info("not units, because parameters of theirs are used elsewhere, too: %s", ", ".join(units.tied))
        upcast_parameters(model, self.policy)
        self.convert_layers(cast_parameters(root, self.policy))
        sharder = self._sharder()
        self._axes.apply(root, self.device, sharder.send)
        units = self._units(model)
        sharded = shard_model(root, units, sharder)
        if self.session.world_size > 1:  # before ``follow``, which sets another all-gather for 8-bit weights
            from accel_backends.fsdp.collectives import explain_collectives

            explain_collectives([cast("FSDPModule", root), *sharded.units])
        backend = self.session.device.collective_backend
        sharded.follower = follow(
            root, sharded.units, self.converter(), collective_backend=backend, device_type=self.device.type
        )
        self._sharded[root] = sharded
        gather_first = untraced(partial(gather_outside_inference_mode, sharded=sharded))
        root.register_forward_pre_hook(gather_first, prepend=True)
        root.register_forward_hook(untraced(partial(reshard_after_evaluation, sharded=sharded)))
        replace_parameters(given, named_parameters(root), kind)
        refuse_copies([root, *cast("list[nn.Module]", sharded.units)], kind, self.name)
        take_full_tensors(root)
        self._outside[root] = refuse_outside(
            outside_units(root, cast("list[nn.Module]", sharded.units)), kind, version=2
        )
        if self.layout.shared_degrees or self._spread.expert_size > 1:
            CommonCalls(self.run, kind).attach(root)
        if self.session.world_size > 1:
            own = {name: root.get_submodule(name) for name in ("", *units.inside_out)}
            pairs = {name: (module, module) for name, module in own.items()}
            watch_units(root, kind, pairs, self.session.group, replicas=self.layout.degrees[0])
        return model

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """As every backend.

        Removes the hooks that explain calls outside of forward, because each would split the graph.
        """
        if plugin.enabled:
            for handle in self._outside.pop(innermost(model), ()):
                handle.remove()
        return super().compile(model, plugin)

    def convert_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """Returns this rank's shard of a full state tensor."""
        return placed_like(value, parameter)

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops prepared models; they stay sharded, and can be prepared again."""
        models = list(models)
        super().release(models)
        for model in models:
            sharded = self._sharded.pop(innermost(model), None)
            if sharded is not None:
                self._released[innermost(model)] = sharded
                if sharded.usage is not None:
                    sharded.usage.remove()

    def close(self) -> None:
        """Drops everything, and destroys the process group of a single process."""
        super().close()
        self._sharded.clear()
        self._released.clear()
        self._spread.close()

    # A step

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """As on one device. A backward that fails drops the unreduced gradients of its accumulation window.

        Raises:
            BackendError: backward needs parameters that have been resharded; see ``outside_forward.explained``.
        """
        reducing = [(root, sharded) for root, sharded in self._sharded.items() if sharded.synchronising]
        replicated = [sharded.replicated for _, sharded in reducing if sharded.replicated]
        watched = [
            (sharded.usage, [root, *cast("list[nn.Module]", sharded.units)])
            for root, sharded in reducing
            if sharded.usage is not None
        ]
        for usage, modules in watched:
            usage.begin(modules)
        for one in replicated:
            one.deferred = True
        try:
            with explained(2):
                super().backward(loss, scale=scale, **kwargs)
        except BaseException:
            for root in self._sharded:
                leave_backward(root)
            raise
        finally:
            for one in replicated:
                one.deferred = False
        for one in replicated:
            one.average()
        for usage, modules in watched:
            usage.end(modules, device=self.device, group=self.session.group)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which unreduced full gradients accumulate on each rank; a backward outside of it reduces them."""
        return self._synchronising(model, enable=False)

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward reduces the accumulated gradients."""
        return self._synchronising(model, enable=True)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps on the shards, after freeing the full parameters that a forward without backward has left.

        Afterwards recomputes the scales of weights that are all-gathered in 8 bits.
        """
        for root, sharded in self._sharded.items():
            reshard(root, sharded)
        stepped = super().step(optimizer, closure)
        for sharded in self._sharded.values():
            if sharded.follower is not None:
                sharded.follower.renew()
        return stepped

    # Helpers of the above

    def _units(self, model: nn.Module) -> Units:
        return units_of(model, self.policy, self._options, experts=self._axes.experts(innermost(model)))

    def _splitting(self, models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
        """Returns, by id, the parameters that will be sharded or are sharded already."""
        found: dict[int, nn.Parameter] = {}
        for model in models:
            if is_sharded(innermost(model)):
                found |= {id(parameter): parameter for parameter in model.parameters() if is_dtensor(parameter)}
            else:
                found |= {id(p): p for p in parameters_to_split(model, self._units(model)) if not stays_full(p)}
        return found

    def _sharder(self) -> Sharder:
        return Sharder(
            self._options,
            self._spread.mesh,
            self.device,
            shard_dtypes(self.policy, self._options),
            group=self.session.group,
            source_filled=self._source_filled,
            all_filled=self._all_filled,
            expert_mesh=self._spread.experts if self._spread.expert_size > 1 else None,
        )

    def _synchronising(self, model: nn.Module, *, enable: bool) -> AbstractContextManager[Any]:
        root = innermost(model)
        sharded = self._sharded.get(root)
        return NOTHING if sharded is None else synchronising(root, sharded, enable)
