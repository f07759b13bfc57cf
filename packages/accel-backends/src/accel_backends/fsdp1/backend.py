"""Backend of FSDP version 1, for code that depends on the ``FullyShardedDataParallel`` wrapper."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.core.backend import _NOTHING, Backend
from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.option_parsing import ShardingLevel
from accel_backends.fsdp.backward_errors import explained
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.full_state_loading import refuse_full_tensors
from accel_backends.fsdp.mesh import ShardingMesh
from accel_backends.fsdp.outside_forward import refuse_outside
from accel_backends.fsdp.shard import checkpointed, replace_modules, shard_dtypes, units_of
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
from accel_backends.fsdp1.unreduced_gradients import set_unreduced_gradients, unreduced_gradients
from accel_backends.fsdp1.wrap import find_fsdp1, first_names_of, outside_units, wrapper_arguments
from accel_backends.ops.clip import Pieces
from accel_backends.ops.compile import TorchDynamoPlugin
from accel_backends.ops.copying import refuse_copies
from accel_backends.ops.dtensor import placed_like, sharded_like
from accel_backends.ops.fqn import innermost, named_parameters, places
from accel_backends.ops.master_weights import upcast_parameters, upcasts
from accel_backends.ops.meta_init import Made, check_initialisers, is_meta, materialise
from accel_backends.ops.optimizer_trial import check_on_pieces
from accel_backends.ops.state_dicts import STATE, optimizer_state
from accel_precision.autocast import cast_parameters
from accel_precision.convert import converter
from accel_state.collectives.tensors import broadcast
from accel_state.errors import BackendError, CheckpointMismatchError, PrepareError
from accel_state.logging import get_logger
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_log = get_logger(__name__)
_MESHLESS = (
    "wrapped in FullyShardedDataParallel without a device_mesh: it trains, but its states are in a form that torch has "
    "given up and cannot be saved; wrap it with device_mesh=init_device_mesh(...), or give prepare the bare model"
)


@final
class FSDP1Backend(Backend):
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
    distributed_type: ClassVar[str] = "FSDP"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = cast(FSDPConfig, self.config).of_version(1, "fsdp")
        self._spread = ShardingMesh(self.session, self._options, flat=True)
        self._filled = [True]
        self._outside: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()

    @classmethod
    def options(cls, values: Mapping[str, Any]) -> BackendConfig:
        """Builds options with ``fsdp_version=1``, which the name of this backend implies."""
        return FSDPConfig.build({"fsdp_version": 1, **values})

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas and shard degree, from the options."""
        return self._spread.degrees

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses models and optimizers that cannot be sharded, as the backend "fsdp" does."""
        if not bundle.training:
            return
        check_separate(bundle.models)
        splitting: dict[int, nn.Parameter] = {}
        for model in bundle.models:
            if self.session.rank == 0 and is_meta(model):
                check_initialisers(innermost(model), self._options.param_init_fn)
            if find_fsdp1(model) is not None:
                splitting |= {id(parameter): parameter for parameter in model.parameters()}
                continue
            units = self._units(model)
            check_model(model, units, upcast=upcasts(self.policy))
            check_hooks(model, units, version=1)
            check_gradients(model, units)
            check_dimensions(model, units)
            splitting |= {id(parameter): parameter for parameter in parameters_to_split(model, units)}
        check_optimizers(bundle.optimizers, self._options, splitting)
        check_on_pieces(bundle.optimizers, splitting, "cpu" if self._options.cpu_offload else self.device)
        stepped = {id(optimizer) for optimizer in _to_split(bundle)}
        for optimizer in bundle.optimizers:
            users = len(_updated(optimizer, bundle.models))
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
        whole = [model for model in bundle.models if find_fsdp1(model) is None]
        synchronised = self._options.sync_module_states
        self._filled = compare_ranks(whole, self._units, synchronised=synchronised, group=self.session.group)
        stepped = _to_split(bundle)
        states = [optimizer_state(optimizer, bundle.models) for optimizer in stepped]
        for optimizer in stepped:
            optimizer.state.clear()
        bound = super().bind(bundle)
        for optimizer, state in zip(stepped, states, strict=True):
            self.load_optimizer_state(optimizer, bound.models, state)
        return bound

    def ready(self, model: nn.Module, *, placed: bool, training: bool) -> nn.Module:
        """Wraps a model that trains, precision included; a model that is only evaluated stays unsharded."""
        return self.prepare_model(model) if training else super().ready(model, placed=placed, training=False)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Wraps the model in ``FullyShardedDataParallel``; a model that the user has wrapped is left as it is."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        from accel_backends.fsdp1.root import ExplainedRoot

        if (wrapped := find_fsdp1(model)) is not None:
            if wrapped._device_mesh is None:
                _log.warning("%s was %s", type(innermost(model)).__name__, _MESHLESS)
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
            broadcast([*(p.data for p in model.parameters()), *model.buffers()], group=self.session.group)
        blocks = {id(root.get_submodule(name)): root.get_submodule(name) for name in units.blocks}
        arguments = wrapper_arguments(
            root, units, self._options, self.policy, degrees=self.degrees, mesh=self._spread.mesh, device=self.device
        )
        if self._options.activation_checkpointing:
            replacing = {key: checkpointed(block) for key, block in blocks.items()}
            replace_modules(root, replacing)
        wrapped = ExplainedRoot(model, **arguments, **values)
        replace_modules(wrapped, {id(unit.module): unit for unit in FullyShardedDataParallel.fsdp_modules(wrapped)})
        if self._options.sharding_strategy is ShardingLevel.NO_SHARD:
            # Before the reduction their gradients have the dtype of the computation, which torch refuses.
            for parameter in wrapped.parameters():
                if hasattr(parameter, "grad_dtype"):
                    parameter.grad_dtype = None
        self._name_states(wrapped)
        self._convert_outputs(wrapped)
        names = {id(place.module): place.prefix.removesuffix(".") for place in places(wrapped)}
        watched = {
            names[id(innermost(unit))]: (unit, unit.module) for unit in FullyShardedDataParallel.fsdp_modules(wrapped)
        }
        refuse_full_tensors(wrapped, root)
        self._outside[root] = refuse_outside(outside_units(wrapped), type(root).__name__, version=1)
        refuse_copies([root, *FullyShardedDataParallel.fsdp_modules(wrapped)], type(root).__name__, self.name)
        watch_units(wrapped, type(root).__name__, watched, self.session.group, replicas=self.degrees[0])
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
        self._spread.close()

    # A step

    @property
    def gradient_average(self) -> int:
        """World size of the session."""
        return self.session.world_size

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """As on one device.

        Raises:
            BackendError: backward needs parameters that have been resharded; see ``backward_errors``.
        """
        with explained(1):
            super().backward(loss, scale=scale, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The ``no_sync`` of the wrapper."""
        wrapped = find_fsdp1(model)
        return _NOTHING if wrapped is None else wrapped.no_sync()

    @property
    def gradient_pieces(self) -> Pieces | None:
        """Mesh and dimension over which flat gradients are sharded; None with shard degree 1."""
        mesh = self._spread.mesh
        return None if self.degrees[1] == 1 else (mesh, (mesh.ndim - 1,))

    # States

    @recorded("get_state_dict")
    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Returns DTensors by FQN. Collective: every rank of the group must call this.

        Raises:
            BackendError: the user has wrapped the model without a mesh.
        """
        wrapped = find_fsdp1(model)
        if wrapped is None:
            return super().model_state(model)
        if wrapped._device_mesh is None:
            raise BackendError(f"{type(innermost(model)).__name__} was {_MESHLESS}")
        first = first_names_of(wrapped)
        state: dict[str, Any] = {}
        for name, value in wrapped.state_dict().items():
            state.setdefault(first.get(name, name), value)
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        wrapped = find_fsdp1(model)
        if wrapped is None:
            super().load_model_state(model, state, strict=strict)
            return
        first, own = first_names_of(wrapped), wrapped.state_dict()
        given = {first.get(name, name): value for name, value in state.items()}
        known = {first.get(name, name) for name in own}
        missing, unknown = sorted(known - set(given)), sorted(set(given) - known)
        pairs = {name: (value, given.get(first.get(name, name))) for name, value in own.items()}
        misshapen = [name for name, (mine, other) in pairs.items() if other is not None and other.shape != mine.shape]
        if misshapen or (strict and (missing or unknown)):
            raise CheckpointMismatchError(
                f"state of another {type(innermost(model)).__name__}: it lacks {missing[:5]}, holds unknown "
                f"{unknown[:5]}, and has other shapes of {misshapen[:5]}"
            )
        placed = {
            name: sharded_like(given[first.get(name, name)], value)
            for name, value in own.items()
            if first.get(name, name) in given
        }
        wrapped.load_state_dict(own | placed)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """The wrapper's ``summon_full_params``."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        summoned: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(model, writeback=writeback)
        return summoned

    def unreduced_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns unreduced gradients plus those reduced earlier in the window, as full tensors by FQN."""
        wrapped = find_fsdp1(model)
        return super().unreduced_gradients(model) if wrapped is None else unreduced_gradients(wrapped)

    def set_unreduced_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Reduces the given gradients at once; later backwards of the accumulation window add to the result.

        Raises:
            BackendError: parameters are offloaded from a device; torch cannot add their gradients to reduced ones.
        """
        wrapped = find_fsdp1(model)
        if wrapped is None:
            super().set_unreduced_gradients(model, gradients)
            return
        if self._offloads:
            raise BackendError(
                "this checkpoint was taken within an accumulation window, which cannot go on with cpu_offload=True of "
                "fsdp_version=1; nearest: fsdp_version=2, or cpu_offload=False"
            )
        set_unreduced_gradients(wrapped, gradients, group=self.session.group)

    def optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns optimizer states as DTensors, by FQN."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        own = self.model_state(model)
        unknown = sorted(set(state[STATE]) - set(named_parameters(model)))
        if unknown:
            kind = type(optimizer).__name__
            raise CheckpointMismatchError(f"state of another {kind}: it holds unknown {unknown[:5]}")
        values = {
            name: {key: placed_like(value, own.get(name)) for key, value in entries.items()}
            for name, entries in state[STATE].items()
        }
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {**state, STATE: values})
        )

    # Helpers of the above

    @property
    def _offloads(self) -> bool:
        """Whether parameters are offloaded: with training on the CPU they are in host memory anyway."""
        return bool(self._options.cpu_offload) and self.device.type != "cpu"

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

    def _model_of(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> "FullyShardedDataParallel":
        owners = _updated(optimizer, models)
        wrapped = find_fsdp1(owners[0]) if len(owners) == 1 else None
        if wrapped is None:
            raise BackendError(
                f"{type(optimizer).__name__} updates {len(owners)} models; fsdp_version=1 saves optimizers of one "
                "sharded model each"
            )
        return wrapped


def _updated(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the models that hold parameters of the optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model in models if held & {id(parameter) for parameter in model.parameters()}]


def _to_split(bundle: Bundle) -> list[Optimizer]:
    """Returns the optimizers with state for models that are not wrapped yet."""
    whole = [model for model in bundle.models if find_fsdp1(model) is None]
    return [one for one in bundle.optimizers if any(one.state.values()) and _updated(one, whole)]
