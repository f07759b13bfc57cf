"""Template of the backends that prepare module by module: check, place, convert, wrap, rebind optimizers."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from accel_backends.core.backend import Backend
from accel_backends.core.bundle import Bundle, check_bundle
from accel_backends.core.rank_comparison import compare_bundles
from accel_backends.core.rebind import rebind, state_to_device
from accel_backends.core.replaced import follow_successors
from accel_backends.ops.activation_checkpointing import ActivationCheckpointing
from accel_backends.ops.blocks import declared_or_repeated_blocks
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.master_weights import upcast_parameters, upcast_states
from accel_precision.autocast import autocast_module, cast_parameters
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from accel_precision.fp8 import ModuleConverter


class ModuleBackend(Backend):
    """Prepares one model after the other: ``prepare`` calls the hooks below, of which a backend must have ``wrap``.

    The hooks, in the order of their calls: ``check`` the bundle, look for the blocks of activation checkpointing
    (``blocks``), ``bind`` the bundle; for each model ``ready``, which calls
    ``place`` and ``wrap``; then ``convert_state`` for the state of optimizers whose parameters were replaced.
    """

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Wraps one placed model for training, or returns it unwrapped."""

    def prepare(self, bundle: Bundle) -> Bundle:
        """Prepares a bundle: same order and lengths in the result, optimizers bound to the parameters of its models.

        Every rank prepares the same bundle; if one rank fails, all raise. Optimizers may be built of the parameters of
        a model before an earlier call prepared it.

        Collective: every rank of the group must call this.

        Raises:
            PrepareError: see ``check_bundle``; ranks prepare models or optimizers that differ.
        """
        for optimizer in bundle.optimizers:
            follow_successors(optimizer, convert=self.convert_state)
        problem: Exception | None = None
        try:
            if len(bundle.models) > 1 and not self.capabilities.several_models:
                raise PrepareError(
                    f"backend {self.name!r} prepares one model in a call, and got {len(bundle.models)}; call "
                    "prepare for each"
                )
            check_bundle(
                bundle,
                prepared=self.owned.models,
                owned=self.owned.parameters,
                meta_allowed=self.capabilities.meta_device,
            )
            self.check(bundle)
            recomputed = self._recomputed_blocks(bundle)
        except PrepareError as error:
            problem, recomputed = error, []
        self._agree(problem)
        if self.session.world_size > 1:
            compare_bundles(bundle, group=self.session.group, apart=self.apart)
        if bundle.training:
            upcast_states(bundle.optimizers, self.policy)
        for model, names in recomputed:
            cast(ActivationCheckpointing, self.recomputed).apply(model, names)
        return self.bind(bundle)

    @property
    def apart(self) -> Collection[int]:
        """Ids of parameters of prepared models, of which ranks have other numbers. Default: they have the same."""
        return ()

    def check(self, bundle: Bundle) -> None:
        """Raises PrepareError for a bundle that this backend cannot prepare, before any change.

        Default: accepts all, except models without experts if these have a capacity.
        """
        for model in bundle.models if bundle.training else ():
            self.layout.check_experts(innermost(model))

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
        for original, model in zip(originals, models, strict=True):
            self.owned.add(original, model)
        return replace(bundle, models=models)

    def ready(self, model: nn.Module, *, placed: bool, training: bool) -> nn.Module:
        """Prepares one model of a bundle. Default: places it, applies the precision, and wraps it if it trains."""
        if training:
            upcast_parameters(model, self.policy)
        if placed:
            # Converted first: the device would otherwise hold the parameters in both dtypes.
            model = self.place(cast_parameters(model, self.policy))
        model = self.apply_precision(model)
        if training:
            self.layout.bound_experts(innermost(model))
        return self.wrap(model) if training else model

    def place(self, model: nn.Module) -> nn.Module:
        """Moves a model to the device that it trains on. Default: the session's device."""
        return model.to(self.device)

    def apply_precision(self, model: nn.Module) -> nn.Module:
        """Applies the policy's dtypes to a model. Default: parameters, buffers, fp8 layers, autocast around calls."""
        model = self.convert_layers(cast_parameters(model, self.policy))
        return autocast_module(model, self.policy, self.device.type, self.run.autocast)

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

    @property
    def recomputed(self) -> ActivationCheckpointing | None:
        """Activations that backward recomputes, by the run's options, otherwise by the backend's; None: none."""
        return self.run.activation_checkpointing or self.config.recomputed

    def blocks(self, model: nn.Module) -> Sequence[str]:
        """Returns the names of the blocks of the user's own module.

        Activation checkpointing recomputes them unless its options select others. Default: the blocks that the model
        declares or repeats.
        """
        return declared_or_repeated_blocks(model)

    def convert_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """Converts a value of optimizer state for the parameter that replaces the old one. Default: unchanged."""
        return value

    def _recomputed_blocks(self, bundle: Bundle) -> list[tuple[nn.Module, list[str]]]:
        """Returns the models of a bundle that have blocks to recompute, with these blocks."""
        how = self.recomputed
        if how is None or not bundle.training:
            return []
        found: list[tuple[nn.Module, list[str]]] = []
        problem: PrepareError | None = None
        for root in map(innermost, bundle.models):
            try:
                found.append((root, how.find(root, self.blocks(root))))
            except PrepareError as error:  # a model without blocks beside one that has them, a head for example
                problem = problem or error
        if problem is not None and not found:
            raise problem
        return found

    def _agree(self, problem: Exception | None) -> None:
        if self.session.world_size > 1:
            from accel_state.collectives.tensors import agree

            agree(problem, group=self.session.group)
        if problem is not None:
            raise problem
