"""Backend of FSDP version 1, for code that depends on the ``FullyShardedDataParallel`` wrapper."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.option_parsing import ShardingLevel
from accel_backends.core.run import Run
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.mesh import MeshLayout, ShardingMesh
from accel_backends.fsdp.outside_forward import explained, refuse_outside
from accel_backends.fsdp.shard import replace_modules, shard_dtypes, units_of
from accel_backends.fsdp.states import refuse_full_tensors
from accel_backends.fsdp.unit_record import watch_units
from accel_backends.fsdp.validate import (
    check_dimensions,
    check_gradients,
    check_hooks,
    check_model,
    check_optimizers,
    check_separate,
    compare_ranks,
)
from accel_backends.fsdp.wrap_units import Units, parameters_to_split
from accel_backends.fsdp1.gradients import FlatGradients
from accel_backends.fsdp1.states import MESHLESS, FlatStates, updated
from accel_backends.fsdp1.unreduced_gradients import leave_backward
from accel_backends.fsdp1.wrap import check_ignored, check_trained, outside_units, wrapper_arguments
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.copying import refuse_copies
from accel_backends.ops.dtensor import is_quantized
from accel_backends.ops.fqn import find_fsdp1, innermost, places
from accel_backends.ops.master_weights import upcast_parameters, upcasts
from accel_backends.ops.meta_init import Made, check_initialisers, is_meta, materialise
from accel_backends.ops.optimizer_support import check_on_pieces
from accel_backends.ops.state_dicts import optimizer_state
from accel_backends.roles.gradients import NOTHING
from accel_precision.autocast import cast_parameters
from accel_precision.convert import converter
from accel_state.collectives.tensors import broadcast
from accel_state.errors import PrepareError
from accel_state.logging import get_logger
from accel_state.private import untraced

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from accel_backends.fsdp1.root import OneBackward, Wrapped

_log = get_logger(__name__)


@final
class FSDP1Backend(ModuleBackend):
    """Wraps models in ``FullyShardedDataParallel``, always over a mesh, so that states are DTensors by FQN.

    Parameters of a prepared model are flat slices; their names and the optimizers that hold them stay. A model that is
    on the meta device on all ranks is initialised unit by unit; if rank 0 has values, the other ranks hold the full
    model while it is wrapped.
    """

    name: ClassVar[str] = "fsdp1"
    Config: ClassVar[type[BackendConfig]] = FSDPConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        ranks=(2, None), sharded=True, offload=True, meta_device=True, optimizer_states_of_some=False
    )
    named_options: ClassVar[Mapping[str, Any]] = {"fsdp_version": 1}
    distributed_type: ClassVar[str] = "FSDP"

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        self._options = cast(FSDPConfig, self.config).of_version(1, "fsdp")
        self._spread = ShardingMesh(self.session, self._options, flat=True)
        self._filled = [True]
        self._outside: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._wrapped: Wrapped = WeakSet()
        self._guards: WeakKeyDictionary[nn.Module, OneBackward] = WeakKeyDictionary()
        self.layout = MeshLayout(run, self._spread)
        self.gradients = FlatGradients(self, self._spread, offloads=bool(self._options.cpu_offload))
        self.states = FlatStates(self)

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses models and optimizers that cannot be sharded, as the backend "fsdp" does."""
        if not bundle.training:
            return
        check_separate(bundle.models)
        converted = (self.policy.params, shard_dtypes(self.policy, self._options).get("param_dtype"))
        splitting: dict[int, nn.Parameter] = {}
        for model in bundle.models:
            if self.session.rank == 0 and is_meta(model):
                check_initialisers(innermost(model), self._options.param_init_fn)
            if find_fsdp1(model) is not None:
                splitting |= {id(parameter): parameter for parameter in model.parameters()}
                continue
            units = self._units(model)
            check_model(model, units, upcast=upcasts(self.policy), version=1, converted=converted)
            check_hooks(model, units, version=1)
            check_gradients(model, units)
            check_dimensions(model, units)
            check_ignored(innermost(model), units)
            if self._options.sharding_strategy is ShardingLevel.NO_SHARD:
                check_trained(innermost(model), units)
            splitting |= {id(parameter): parameter for parameter in parameters_to_split(model, units)}
        check_optimizers(bundle.optimizers, self._options, splitting)
        check_on_pieces(bundle.optimizers, splitting, "cpu" if self._options.cpu_offload else self.device)
        stepped = {id(optimizer) for optimizer in _to_split(bundle)}
        for optimizer in bundle.optimizers:
            users = len(updated(optimizer, bundle.models))
            if users > 1:
                _log.warning(
                    "%s updates %d models: it trains, but cannot be saved with fsdp_version=1; give each model an "
                    "optimizer, or use fsdp_version=2",
                    type(optimizer).__name__,
                    users,
                )
            if users != 1 and id(optimizer) in stepped:
                raise PrepareError(
                    f"{type(optimizer).__name__} has stepped already and updates several models, and fsdp_version=1 "
                    "cannot split its state; give each model an optimizer, or use fsdp_version=2"
                )

    def bind(self, bundle: Bundle) -> Bundle:
        """As every backend, after all ranks have verified that they prepare the same.

        Shards the states of optimizers.
        """
        if not bundle.training:
            return super().bind(bundle)
        replicated = [model for model in bundle.models if find_fsdp1(model) is None]
        synchronised = self._options.sync_module_states
        self._filled = compare_ranks(replicated, self._units, synchronised=synchronised, group=self.session.group)
        stepped = _to_split(bundle)
        states = [optimizer_state(optimizer, bundle.models) for optimizer in stepped]
        for optimizer in stepped:
            optimizer.state.clear()
        bound = super().bind(bundle)
        for optimizer, state in zip(stepped, states, strict=True):
            self.states.load_optimizer(optimizer, bound.models, state)
        return bound

    def blocks(self, model: nn.Module) -> Sequence[str]:
        """Returns the names of the units that are repeated blocks."""
        return self._units(model).blocks

    def ready(self, model: nn.Module, *, placed: bool, training: bool) -> nn.Module:
        """Wraps a model that trains, precision included; a model that is only evaluated stays unsharded."""
        return self.wrap(model) if training else super().ready(model, placed=placed, training=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wraps the model in ``FullyShardedDataParallel``; a model that the user has wrapped is left as it is."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        from accel_backends.fsdp1.root import ExplainedRoot, is_sharded

        if (wrapped := find_fsdp1(model)) is not None:
            if wrapped._device_mesh is None:
                _log.warning("%s was %s", type(innermost(model)).__name__, MESHLESS)
            self._watch(wrapped)
            self._name_states(wrapped)
            return model
        upcast_parameters(model, self.policy, frozen=True)  # the parameters of a flat parameter have one dtype
        self.convert_layers(cast_parameters(model, self.policy))
        units, root = self._units(model), innermost(model)
        values: dict[str, Any] = {}
        if not any(self._filled) and is_meta(root):
            values = {"param_init_fn": self._initialiser()}
        elif not all(self._filled):
            materialise(root.modules(), self.device, made={}, values_follow=True)
        if self._options.sync_module_states and not values:
            model.to(self.device)
            sent = [parameter.data for parameter in model.parameters() if not is_quantized(parameter)]
            broadcast([*sent, *model.buffers()], group=self.session.group)
        arguments = wrapper_arguments(
            root,
            units,
            self._options,
            self.policy,
            degrees=self.layout.degrees,
            mesh=self._spread.mesh,
            device=self.device,
        )
        wrapped = ExplainedRoot(model, **arguments, **values)
        replace_modules(wrapped, {id(unit.module): unit for unit in FullyShardedDataParallel.fsdp_modules(wrapped)})
        if self._options.sharding_strategy is ShardingLevel.NO_SHARD:
            # Before the reduction their gradients have the dtype of the computation, which torch refuses.
            for parameter in wrapped.parameters():
                if hasattr(parameter, "grad_dtype"):
                    parameter.grad_dtype = None
        self._name_states(wrapped)
        self._convert_outputs(wrapped)
        self._watch(wrapped)
        names = {id(place.module): place.prefix.removesuffix(".") for place in places(wrapped)}
        watched = {
            names[id(innermost(unit))]: (unit, unit.module) for unit in FullyShardedDataParallel.fsdp_modules(wrapped)
        }
        refuse_full_tensors(wrapped, root, units.ignored, sharded=is_sharded(wrapped))
        self._outside[root] = refuse_outside(outside_units(wrapped), type(root).__name__, version=1)
        refuse_copies([root, *FullyShardedDataParallel.fsdp_modules(wrapped)], type(root).__name__, self.name)
        watch_units(wrapped, type(root).__name__, watched, self.session.group, replicas=self.layout.degrees[0])
        return wrapped

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """As every backend.

        Removes the hooks that explain calls outside of forward, because each would split the graph.
        """
        if plugin.enabled:
            for handle in self._outside.pop(innermost(model), ()):
                handle.remove()
        return super().compile(model, plugin)

    def close(self) -> None:
        """Drops everything."""
        super().close()
        self._wrapped.clear()
        self._guards.clear()
        self._spread.close()

    # A step

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """As on one device. A backward that fails drops the gradients of its accumulation window.

        Raises:
            BackendError: backward needs parameters that have been resharded; see ``outside_forward.explained``. Without
                sharding, a backward that is not the first one after its forward.
        """
        try:
            with explained(1):
                super().backward(loss, scale=scale, **kwargs)
        except BaseException:
            for unit in self._wrapped:
                leave_backward(unit)
            raise
        finally:
            for guard in self._guards.values():
                guard.finish()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The ``no_sync`` of the wrapper."""
        wrapped = find_fsdp1(model)
        return NOTHING if wrapped is None else wrapped.no_sync()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps on the shards, after freeing the full parameters that a forward without backward has left."""
        if self._wrapped:
            from accel_backends.fsdp1.root import reshard

            reshard(self._wrapped)
        return super().step(optimizer, closure)

    # Helpers of the above

    def _watch(self, wrapped: "FullyShardedDataParallel") -> None:
        """Adds the hooks that reshard a model after evaluations, and refuse backwards that torch would not reduce."""
        from accel_backends.fsdp1.root import (
            OneBackward,
            Wrapped,
            allocate_outside_inference_mode,
            is_sharded,
            reshard_after_evaluation,
        )

        units = Wrapped(type(wrapped).fsdp_modules(wrapped))
        wrapped.register_forward_pre_hook(untraced(allocate_outside_inference_mode), prepend=True)
        wrapped.register_forward_hook(untraced(partial(reshard_after_evaluation, units=units)))
        self._wrapped |= units
        if not is_sharded(wrapped):
            guard = self._guards[wrapped] = OneBackward()
            wrapped.register_forward_hook(untraced(partial(guard.watch)))  # dynamo marks no bound method

    def _units(self, model: nn.Module) -> Units:
        return units_of(model, self.policy, self._options)

    def _initialiser(self) -> Callable[[nn.Module], None]:
        """Returns the function that the wrapper calls with each module on the meta device before it shards the unit."""
        made: Made = {}

        def initialise(module: nn.Module) -> None:
            materialise([module], self.device, made=made, initialise=self._options.param_init_fn)
            if self._options.sync_module_states:
                own = (*module._parameters.values(), *module._buffers.values())
                broadcast([tensor.data for tensor in own if tensor is not None], group=self.session.group)

        return initialise

    def _convert_outputs(self, wrapped: nn.Module) -> None:
        """Converts outputs to the policy's output dtype, which torch's wrapper does not do."""
        output = shard_dtypes(self.policy, self._options).get("output_dtype")
        if output is not None:
            convert = converter(output)
            wrapped.register_forward_hook(lambda module, inputs, outputs: convert(outputs))

    def _name_states(self, wrapped: "FullyShardedDataParallel") -> None:
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        # Full states with offload crash on CPUs; sharded states do not, and full ones are gathered from them.
        FullyShardedDataParallel.set_state_dict_type(
            wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )


def _to_split(bundle: Bundle) -> list[Optimizer]:
    """Returns the optimizers with state for models that are not wrapped yet."""
    replicated = [model for model in bundle.models if find_fsdp1(model) is None]
    return [one for one in bundle.optimizers if any(one.state.values()) and updated(one, replicated)]
