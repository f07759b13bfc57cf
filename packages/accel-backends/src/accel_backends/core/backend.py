"""Base class of backends: everything that differs between one device and many."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle, check_bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.gradient_methods import BackendGradients
from accel_backends.core.layout_methods import BackendSpread
from accel_backends.core.ownership import Ownership
from accel_backends.core.rank_comparison import compare_bundles
from accel_backends.core.rebind import rebind, state_to_device
from accel_backends.ops.backward import ScaledBackward
from accel_backends.ops.compile import TorchDynamoPlugin, compile_model, unwrap
from accel_backends.ops.footprint import Held
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.loss_scaling import scaled_backward, scaled_step
from accel_backends.ops.master_weights import upcast_parameters, upcast_states
from accel_precision.autocast import autocast_module, cast_parameters, restore_module
from accel_precision.options import AutocastKwargs, GradScalerKwargs
from accel_precision.policy import PrecisionPolicy
from accel_precision.scaler import LossScaler, make_scaler
from accel_state.errors import BackendError, PrepareError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel_precision.fp8 import ModuleConverter
    from accel_state.session import Session

_NOTHING: AbstractContextManager[None] = nullcontext()


class Backend(BackendGradients, BackendSpread):
    """Placement, synchronisation and optimizer steps of models.

    The defaults are those of training on one device, so a backend overrides only the methods in which it differs, and a
    method added here breaks no backend. Concrete backends are final, one level deep, and found by entry points (group
    ``accel.backends``).

    Attributes:
        name: name of the backend's entry point.
        Config: class of the backend's options.
        capabilities: features that the backend supports.
        scaler: loss scale of fp16; None without one, or if the backend has its own.
    """

    name: ClassVar[str]
    Config: ClassVar[type[BackendConfig]] = BackendConfig
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(
        self,
        session: "Session",
        policy: PrecisionPolicy,
        config: BackendConfig | None = None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
    ) -> None:
        """Opens the backend on a session.

        Raises:
            BackendError: a device, precision or number of processes that the backend does not support, with the nearest
                that it does; or options of another backend.
        """
        config = self.options({}) if config is None else config
        if not isinstance(config, self.Config):
            raise BackendError(f"backend {self.name!r} takes {self.Config.__name__}, and got {type(config).__name__}")
        reason = self.capabilities.refusal(self.name, policy, session.device.type, session.world_size)
        if reason is not None:
            raise BackendError(reason)
        self.session = session
        self.policy = policy
        self.config = config
        self.autocast_options = autocast or AutocastKwargs()
        self.device: torch.device = session.device.torch
        self.scaler: LossScaler | None = self.make_scaler(scaler)
        self._owned = Ownership()
        self._optimizers: list[ref[Optimizer]] = []
        self._backward = ScaledBackward()

    @classmethod
    def options(cls, values: Mapping[str, Any]) -> BackendConfig:
        """Builds the backend's options from a mapping of their fields."""
        return cls.Config.build(values)

    def reconfigure(self, config: BackendConfig) -> None:
        """Replaces the options for models that are prepared from now on. Default: options cannot be changed.

        Raises:
            BackendError: the backend cannot change them.
        """
        raise BackendError(f"backend {self.name!r} keeps the options that it was opened with")

    # Preparing

    def prepare(self, bundle: Bundle) -> Bundle:
        """Prepares a bundle: same order and lengths in the result, optimizers bound to the parameters of its models.

        Every rank prepares the same bundle; if one rank fails, all raise.

        Collective: every rank of the group must call this.

        Raises:
            PrepareError: see ``check_bundle``; ranks prepare models or optimizers that differ.
        """
        problem: Exception | None = None
        try:
            if len(bundle.models) > 1 and not self.capabilities.several_models:
                raise PrepareError(
                    f"backend {self.name!r} prepares one model in a call, and got {len(bundle.models)}; call "
                    "prepare for each"
                )
            check_bundle(
                bundle,
                prepared=self._owned.models,
                owned=self._owned.parameters,
                meta_allowed=self.capabilities.meta_device,
            )
            self.check(bundle)
        except PrepareError as error:
            problem = error
        self._agree(problem)
        if self.session.world_size > 1:
            compare_bundles(bundle, group=self.session.group)
        if bundle.training:
            upcast_states(bundle.optimizers, self.policy)
        return self.bind(bundle)

    def check(self, bundle: Bundle) -> None:
        """Raises PrepareError for a bundle that this backend cannot prepare, before any change.

        Default: accepts all.
        """

    def bind(self, bundle: Bundle) -> Bundle:
        """Prepares a checked bundle.

        Default: ``ready`` for each model, then optimizers are rebound to the new parameters.
        """
        originals = [innermost(model) for model in bundle.models]
        before = [named_parameters(model) for model in bundle.models]
        models = [
            self.ready(model, placed=placed, training=bundle.training)
            for model, placed in zip(bundle.models, bundle.placed, strict=True)
        ]
        for old, model in zip(before, models, strict=True):
            new = named_parameters(model)
            if any(new.get(name) is not parameter for name, parameter in old.items()):
                for optimizer in bundle.optimizers:
                    rebind(optimizer, old, new, convert=self.convert_state)
        for optimizer in bundle.optimizers:
            state_to_device(optimizer)
        self._optimizers = [known for known in self._optimizers if known() is not None]
        self._optimizers += map(ref, bundle.optimizers)
        for original, model in zip(originals, models, strict=True):
            self._owned.add(original, model)
        return replace(bundle, models=models)

    def ready(self, model: nn.Module, *, placed: bool, training: bool) -> nn.Module:
        """Prepares one model of a bundle. Default: places it, applies the precision, and wraps it if it trains."""
        if training:
            upcast_parameters(model, self.policy)
        model = self.apply_precision(self.place(model) if placed else model)
        return self.prepare_model(model) if training else model

    def place(self, model: nn.Module) -> nn.Module:
        """Moves a model to the device that it trains on. Default: the session's device."""
        return model.to(self.device)

    def apply_precision(self, model: nn.Module) -> nn.Module:
        """Applies the policy's dtypes to a model. Default: parameters, buffers, fp8 layers, autocast around calls."""
        model = self.convert_layers(cast_parameters(model, self.policy))
        return autocast_module(model, self.policy, self.device.type, self.autocast_options)

    def convert_layers(self, model: nn.Module) -> nn.Module:
        """Replaces layers by fp8 ones, if the policy has an fp8 recipe."""
        converter = self.converter()
        return model if converter is None else converter.convert(model)

    def converter(self) -> "ModuleConverter | None":
        """Returns the converter that replaces layers by fp8 ones; None if the policy has no fp8 recipe."""
        if self.policy.fp8 is None:
            return None
        from accel_precision.facts import DeviceFacts
        from accel_precision.fp8 import load_converter

        facts = DeviceFacts.probe(self.device.type)
        return load_converter(self.policy.fp8, facts, sharded=self.gathers_fp8)

    @property
    def gathers_fp8(self) -> bool:
        """Whether sharded weights are all-gathered in 8 bits with these options. Default: from ``capabilities``."""
        return self.capabilities.gathers_fp8

    @abstractmethod
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Wraps one placed model for training, or returns it unwrapped."""

    def convert_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """Converts a value of optimizer state for the parameter that replaces the old one. Default: unchanged."""
        return value

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compiles a prepared model. Default: repeated blocks in place, or the full model in torch's wrapper."""
        return compile_model(model, plugin)

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops prepared models and restores their original class, so that they can be prepared again."""
        for model in models:
            restore_module(innermost(model))
            self._owned.drop(model)
        self._backward.clear()

    def close(self) -> None:
        """Releases everything that the backend holds. Default: all prepared models."""
        self.release(list(self._owned.models))
        self._owned.clear()

    # A step

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Returns the policy's autocast context, for computations outside a model's forward."""
        return self.policy.autocast_context(self.device.type, options or self.autocast_options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward does not reduce the gradients of ``model``.

        Default: there is no reduction to skip.
        """
        return _NOTHING

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward reduces gradients although forward ran under ``no_sync``. Default: no reduction."""
        return _NOTHING

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """Computes the gradients of ``scale`` times ``loss``, times the loss scale of fp16.

        ``kwargs`` go to ``torch.Tensor.backward``.

        Raises:
            BackendError: a loss that is no scalar or has no graph.
            PrecisionError: gradients that carry the loss scale were added to ones from which it had been removed.
        """
        if self.scaler is None:
            self._backward(loss, scale, kwargs)
        else:
            scaled_backward(self.scaler, lambda factor: self._backward(loss, scale * factor, kwargs))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps the optimizer; returns False if all ranks skipped the step because gradients overflowed.

        Raises:
            BackendError: there is a loss scale, and the gradients are of a loss that was not scaled.
        """
        if self.scaler is not None:
            return scaled_step(self.scaler, optimizer, closure, names=self._owned.names)
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises BackendError for a parameter group whose gradients would not be averaged over ranks."""
        if self.gradient_average > 1 or self.capabilities.sharded:
            self._owned.check_added(group["params"])

    def update_scaler(self, *, hold: bool = False) -> None:
        """Adapts the loss scale, once per optimizer step, after all optimizers. Default: if there is a scaler.

        ``hold``: the step is over, but gradients that carry the scale remain, so the scale changes at the next update.
        """
        if self.scaler is not None:
            self.scaler.update(hold=hold)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clears gradients. Default: calls the optimizer's ``zero_grad``."""
        optimizer.zero_grad(set_to_none=set_to_none)
        if self.scaler is not None:
            self.scaler.forget(optimizer)

    def overflow_dropped(self) -> bool:
        """Whether gradients that overflowed were cleared without a step, so that the loss scale has to adapt."""
        return self.scaler is not None and self.scaler.overflow_dropped()

    def join(self, models: Sequence[nn.Module], *, enable: bool = True) -> AbstractContextManager[Any]:
        """Context in which ranks may have different numbers of batches. Default: a null context, for one replica.

        Raises:
            BackendError: several ranks and a backend without ``uneven_inputs``, with which some ranks would wait
                forever.
        """
        if enable and models and self.gradient_average > 1 and not self.capabilities.uneven_inputs:
            raise BackendError(
                f"join: with backend {self.name!r} every rank takes part in every forward and backward, so ranks "
                "cannot have different numbers of batches; nearest: even_batches=True (samples are repeated, and "
                "gather_for_metrics leaves the repeats out), drop_last=True, or strategy='ddp'"
            )
        return _NOTHING

    def average_parameters(self, model: nn.Module) -> None:
        """Replaces parameters by their mean over ranks (local SGD). Default: nothing, because there is one replica.

        Raises:
            BackendError: parameters are sharded, so that no rank can train alone.
        """
        if self.capabilities.sharded and self.gradient_average > 1:
            raise BackendError(
                f"backend {self.name!r} spreads parameters over ranks, and local SGD has each rank train a copy of its "
                "own; nearest: strategy='ddp'"
            )

    # Loss scales, counters, export, inspection

    @property
    def loss_scales(self) -> Sequence[Any]:
        """Loss scales, as objects with ``state_dict`` and ``load_state_dict``. Default: the scaler, if any."""
        return [] if self.scaler is None else [self.scaler]

    def counts(self) -> list[dict[str, int]]:
        """Returns JSON that is saved with a checkpoint and not needed to load it (step counts).

        Default: an empty list.
        """
        return []

    def load_counts(self, counts: Sequence[Mapping[str, int]]) -> None:
        """Restores the step counts that ``counts`` returned, if they are of this backend. Default: does nothing."""

    def export_native(self, model: nn.Module, folder: str, tag: str) -> None:
        """Writes a prepared model in the checkpoint format of the library behind this backend. Default: there is none.

        Raises:
            BackendError: the backend has no checkpoint format of its own.
        """
        raise BackendError(
            f"backend {self.name!r} has no checkpoints of its own form; nearest: save_state here, and load_state and "
            "export with strategy='deepspeed'"
        )

    def held(self, model: nn.Module, optimizer: Optimizer) -> Held:
        """Returns this rank's tensors of parameters, gradients and optimizer state.

        Default: those of the two objects.
        """
        return Held.of(model, optimizer)

    def unwrap(self, model: nn.Module, *, keep_torch_compile: bool = True) -> nn.Module:
        """Returns the user's own module, still compiled if it was and ``keep_torch_compile``; idempotent."""
        return unwrap(model, keep_torch_compile=keep_torch_compile)

    def make_scaler(self, options: GradScalerKwargs | None) -> LossScaler | None:
        """Returns the loss scaler of the policy.

        Default: an overflow on any rank of the session counts on all ranks.
        """
        return make_scaler(self.policy, options, reduce=self._sum_over_ranks if self.session.world_size > 1 else None)

    # Helpers of the above

    @recorded("unscale", shared=False)
    def _sum_over_ranks(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor, group=self.session.group)

    def _agree(self, problem: Exception | None) -> None:
        if self.session.world_size > 1:
            from accel_state.collectives.tensors import agree

            agree(problem, group=self.session.group)
        if problem is not None:
            raise problem
