"""Version 1 of fully sharded data parallelism, for those who depend on its wrapper."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.base import _NOTHING, Backend
from accel_backends.bundle import Bundle
from accel_backends.capabilities import Capabilities
from accel_backends.clip import nonfinite, total_norm
from accel_backends.config import BackendConfig
from accel_backends.fsdp1_wrap import find_fsdp1, first_names_of, wrapper_arguments
from accel_backends.fsdp_check import (
    check_model,
    check_optimizers,
    check_separate,
    compare_ranks,
    upcast_parameters,
)
from accel_backends.fsdp_config import FSDPConfig
from accel_backends.fsdp_shard import checkpointed, computes_in_halves, replace_modules, shard_dtypes
from accel_backends.fsdp_states import sharded_like, whole_optimizer_state, whole_state
from accel_backends.fsdp_values import Sharding, WholeForm
from accel_backends.meta_init import Made, check_initialisers, is_meta, materialise
from accel_backends.names import innermost, named_parameters
from accel_backends.states import STATE, optimizer_state
from accel_backends.wrapping import Units, find_units
from accel_precision.autocast import cast_parameters
from accel_precision.options import AutocastKwargs, GradScalerKwargs
from accel_precision.policy import PrecisionPolicy
from accel_state.collectives import broadcast
from accel_state.errors import BackendError, CheckpointMismatchError, PrepareError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    from accel_state.session import Session


@final
class FSDP1Backend(Backend):
    """Wraps models in ``FullyShardedDataParallel``, always over a mesh, so that states are DTensors under plain names.

    Parameters of a prepared model are flat pieces; their names and the optimizers that hold them stay. A model that is
    on the meta device on all ranks gets its values unit by unit; where rank 0 has values, the others hold the whole
    model while it is wrapped. No checkpoint can be taken within an accumulation window.
    """

    name: ClassVar[str] = "fsdp1"
    Config: ClassVar[type[BackendConfig]] = FSDPConfig
    capabilities: ClassVar[Capabilities] = Capabilities(ranks=(2, None), sharded=True, offload=True, meta_device=True)
    distributed_type: ClassVar[str] = "FSDP"

    def __init__(
        self,
        session: "Session",
        policy: PrecisionPolicy,
        config: BackendConfig | None = None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
    ) -> None:
        config = FSDPConfig(fsdp_version=1) if config is None else config
        super().__init__(session, policy, config, autocast=autocast, scaler=scaler)
        self._options = cast(FSDPConfig, self.config)
        if self._options.fsdp_version != 1:
            raise BackendError(
                f"backend 'fsdp1' is version 1, and the options say {self._options.fsdp_version}; use 'fsdp'"
            )
        if self._options.cpu_offload and self.device.type == "cpu":
            raise BackendError("cpu_offload of fsdp_version=1 needs an accelerator; nearest: fsdp_version=2")
        self._degrees = self._options.degrees(session.world_size, session.topology.local_world_size)
        self._mesh: DeviceMesh | None = None
        self._filled = [True]

    @classmethod
    def options(cls, values: Mapping[str, Any]) -> BackendConfig:
        """Options of version 1, which is what this backend's name says."""
        return FSDPConfig.build({"fsdp_version": 1, **values})

    @property
    def degrees(self) -> tuple[int, int]:
        """Replicas and shards, as the options say."""
        return self._degrees

    @property
    def mesh(self) -> "DeviceMesh":
        """Replicas times shards, or all ranks in one dimension; collective when first read."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            flat = 1 in self._degrees
            shape = (self.session.world_size,) if flat else self._degrees
            names = ("dp_shard",) if flat else ("dp_replicate", "dp_shard")
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._mesh

    # Preparing

    def check(self, bundle: Bundle) -> None:
        """Refuses what cannot be sharded, as the backend "fsdp" does."""
        if not bundle.training:
            return
        check_separate(bundle.models)
        splitting: dict[int, nn.Parameter] = {}
        for model in bundle.models:
            if self.session.rank == 0 and is_meta(model):
                check_initialisers(innermost(model), self._options.param_init_fn)
            if find_fsdp1(model) is None:
                check_model(model, self._units(model), upcast=self.policy.autocast and self.policy.params is None)
            splitting |= {id(parameter): parameter for parameter in model.parameters()}
        check_optimizers(bundle.optimizers, self._options, splitting)
        for optimizer in _to_split(bundle):
            if len(_updated(optimizer, bundle.models)) != 1:
                raise PrepareError(
                    f"{type(optimizer).__name__} has stepped already and updates several models, and fsdp_version=1 "
                    "cannot split its state; give each model an optimizer, or use fsdp_version=2"
                )

    def bind(self, bundle: Bundle) -> Bundle:
        """As every backend, once all ranks are known to prepare the same; states of optimizers are split."""
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
        """Wrapped with its precision built in; a model that is only evaluated stays whole, as on one device."""
        return self.prepare_model(model) if training else super().ready(model, placed=placed, training=False)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model in ``FullyShardedDataParallel``; one that the user has wrapped is left as it is."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if (wrapped := find_fsdp1(model)) is not None:
            self._name_states(wrapped)
            return model
        upcast_parameters(model, self.policy)
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
            root, units, self._options, self.policy, degrees=self._degrees, mesh=self.mesh, device=self.device
        )
        if self._options.activation_checkpointing:
            replacing = {key: checkpointed(block) for key, block in blocks.items()}
            replace_modules(root, replacing)
        wrapped = FullyShardedDataParallel(model, **arguments, **values)
        if self._options.sharding_strategy is Sharding.NO_SHARD:
            # Until they are reduced their gradients have the dtype that they were computed in, which torch refuses.
            for parameter in wrapped.parameters():
                if hasattr(parameter, "grad_dtype"):
                    parameter.grad_dtype = None
        self._name_states(wrapped)
        return wrapped

    # A step

    @property
    def gradient_average(self) -> int:
        """All ranks of the session."""
        return self.session.world_size

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The wrapper's own."""
        wrapped = find_fsdp1(model)
        return _NOTHING if wrapped is None else wrapped.no_sync()

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """As every backend; each rank holds other pieces of the gradients, so their norms are joined."""
        chosen = self._owned.checked(parameters)
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        norm = self._joined_norm(gradients, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            culprits = nonfinite(chosen, self._owned.names) or "none here"
            raise BackendError(
                f"the gradient norm (p={norm_type:g}) is {float(norm)}; gradients with nan or inf: {culprits}"
            )
        if max_norm != float("inf") and gradients:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(factor.to(gradient.device))
        return norm

    # States

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """DTensors under the model's own names."""
        wrapped = find_fsdp1(model)
        if wrapped is None:
            return super().model_state(model)
        first = first_names_of(wrapped)
        state: dict[str, Any] = {}
        for name, value in wrapped.state_dict().items():
            state.setdefault(first.get(name, name), value)
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads sharded or whole tensors, the latter given alike on every rank."""
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

    def whole_model_state(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Whole tensors, gathered one by one; on the host of rank 0 only (elsewhere empty) unless told otherwise."""
        form = self._options.state_form
        return whole_state(self.model_state(model), keep=self._keeps(form, main_only), host=form.offload_to_cpu)

    def whole_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """The wrapper's own summoning of whole parameters."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        summoned: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(model, writeback=writeback)
        return summoned

    def held_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Refused: unreduced gradients are not to be had from the wrapper.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "a checkpoint within an accumulation window cannot be taken with fsdp_version=1; save after a step, or use "
            "fsdp_version=2"
        )

    def optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """DTensors under the names of the parameters."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    def whole_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, main_only: bool | None = None
    ) -> dict[str, Any]:
        """As ``whole_model_state``, of an optimizer."""
        form = self._options.optimizer_state_form
        state = self.optimizer_state(optimizer, models)
        return whole_optimizer_state(state, keep=self._keeps(form, main_only), host=form.offload_to_cpu)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads sharded or whole tensors, the latter given alike on every rank."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        own = self.model_state(model)
        unknown = sorted(set(state[STATE]) - set(named_parameters(model)))
        if unknown:
            kind = type(optimizer).__name__
            raise CheckpointMismatchError(f"state of another {kind}: it holds unknown {unknown[:5]}")
        values = {
            name: {key: _placed(value, own.get(name)) for key, value in entries.items()}
            for name, entries in state[STATE].items()
        }
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {**state, STATE: values})
        )

    # Helpers of the above

    def _keeps(self, form: WholeForm, main_only: bool | None) -> bool:
        return not (form.rank0_only if main_only is None else main_only) or self.session.rank == 0

    def _units(self, model: nn.Module) -> Units:
        halves = computes_in_halves(shard_dtypes(self.policy, self._options))
        return find_units(model, self._options, halves=halves)

    def _initialiser(self) -> Callable[[nn.Module], None]:
        """What the wrapper calls with each module on the meta device, just before it takes the module's unit apart."""
        made: Made = {}

        def initialise(module: nn.Module) -> None:
            materialise([module], self.device, made=made, initialise=self._options.param_init_fn)
            if self._options.sync_module_states:
                own = (*module._parameters.values(), *module._buffers.values())
                broadcast([tensor.data for tensor in own if tensor is not None], group=self.session.group)

        return initialise

    def _name_states(self, wrapped: "FullyShardedDataParallel") -> None:
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        # Whole states with offload end the process on CPUs; sharded ones do not, and whole ones are gathered from them.
        FullyShardedDataParallel.set_state_dict_type(
            wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )

    def _joined_norm(self, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        import torch.distributed as dist

        here = total_norm(gradients, norm_type) if gradients else torch.zeros((), device=self.device)
        if self._degrees[1] == 1:
            return here
        largest = norm_type == float("inf")
        part = here.clone() if largest else here**norm_type
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(part, op=operation, group=self.mesh.get_group("dp_shard"))
        return part if largest else part ** (1.0 / norm_type)

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
    """The models that hold parameters of the optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model in models if held & {id(parameter) for parameter in model.parameters()}]


def _to_split(bundle: Bundle) -> list[Optimizer]:
    """The optimizers that have stepped on models which are still whole."""
    whole = [model for model in bundle.models if find_fsdp1(model) is None]
    return [one for one in bundle.optimizers if any(one.state.values()) and _updated(one, whole)]


def _placed(value: Any, model: Any) -> Any:
    both = isinstance(value, torch.Tensor) and isinstance(model, torch.Tensor)
    return sharded_like(value, model) if both else value
