"""Backend with a full replica on every rank, whose gradients DistributedDataParallel averages."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar, cast, final
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.module_backend import ModuleBackend
from accel_backends.core.run import Run
from accel_backends.ddp.comm_hooks import hook_name, reduce_in
from accel_backends.ddp.config import DDPConfig
from accel_backends.ddp.find import find_ddp
from accel_backends.ddp.gradients import DDPGradients
from accel_backends.ddp.reduction import BareReduction, Reduction
from accel_backends.ddp.states import DDPStates
from accel_backends.ops.dtensor import is_quantized
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.private import leave_out_of_ddp
from accel_backends.roles.gradients import NOTHING
from accel_precision.policy import dtype_name
from accel_state.errors import ConfigError, PrepareError

Kept = TypeVar("Kept")


@final
class DDPBackend(ModuleBackend):
    """Wraps trainable models in DistributedDataParallel; frozen models stay bare, because DDP refuses them."""

    name: ClassVar[str] = "ddp"
    Config: ClassVar[type[BackendConfig]] = DDPConfig
    capabilities: ClassVar[Capabilities] = Capabilities(uneven_inputs=True, loads_in_place=True)

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        super().__init__(run, config)
        self._reductions: list[Reduction | BareReduction] = []
        self._optimizers: list[ref[Optimizer]] = []
        self._schedulers: list[ref[Any]] = []
        self.gradients = DDPGradients(self, self._reductions, self._optimizers, self._schedulers)
        self.states = DDPStates(self)

    def bind(self, bundle: Bundle) -> Bundle:
        """As every backend; afterwards ``join`` knows the optimizers and schedulers."""
        bound = super().bind(bundle)
        self._optimizers[:] = [*_living(self._optimizers), *map(ref, bundle.optimizers)]
        self._schedulers[:] = [*_living(self._schedulers), *map(ref, bundle.schedulers)]
        return bound

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wraps the model in DDP; returns ``model`` if it is frozen or in DDP already, or if there is only one rank.

        Raises:
            PrepareError: parameters are sharded already (DTensors).
        """
        if self.session.world_size == 1:
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self._reductions.append(BareReduction(innermost(model), self.session.group))
            return model
        given = find_ddp(model)
        if given is not None:
            self._reductions.append(Reduction(given, given.process_group, given=True))
            return model
        _check_full(model)
        config = cast(DDPConfig, self.config)
        if config.sync_batch_norm:
            from accel_backends.ddp.sync_batch_norm import convert_sync_batch_norm

            model = convert_sync_batch_norm(model, self.session.group)
        _leave_out_quantized(model)
        device_ids = None if self.device.type == "cpu" else [self.device]
        wrapped = DistributedDataParallel(
            model, device_ids=device_ids, process_group=self.session.group, **config.arguments()
        )
        self._register_hook(wrapped, config)
        self._reductions.append(Reduction(wrapped, self.session.group))
        return wrapped

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops prepared models, and the reductions of their gradients."""
        models = list(models)
        gone = [find_ddp(model) or innermost(model) for model in models]
        self._reductions[:] = [one for one in self._reductions if one.model not in (None, *gone)]
        super().release(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """DDP's ``no_sync``: gradients accumulate on each rank until a backward outside of the context reduces them.

        With ``static_graph`` the first backward reduces nevertheless, because torch records the graph in it. The result
        is the same, because the mean over ranks of that mean and later gradients is the mean of all. Every backward
        reduces within ``join``, where the accumulation windows of ranks end at different batches.
        """
        wrapped = find_ddp(model)
        if wrapped is None:
            return self._bare(model, synchronising=False)
        if wrapped._join_config.enable:
            return NOTHING
        own = [one for one in self._reductions if isinstance(one, Reduction) and one.model is wrapped]
        if wrapped.static_graph and not any(one.recorded for one in own):
            return NOTHING
        for reduction in own:
            reduction.settle()
        return wrapped.no_sync()

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context that prepares DDP's reducer for a backward whose forward ran under ``no_sync``."""
        wrapped = find_ddp(model)
        return self._bare(model, synchronising=True) if wrapped is None else _synchronising(wrapped)

    def _bare(self, model: nn.Module, *, synchronising: bool) -> AbstractContextManager[Any]:
        """Context in which backward averages, or does not, the gradients of a model without DDP."""
        root = innermost(model)
        own = [one for one in self._reductions if isinstance(one, BareReduction) and one.model is root]
        return _averaging(own, synchronising) if own else NOTHING

    def _register_hook(self, wrapped: DistributedDataParallel, config: DDPConfig) -> None:
        """Registers the configured hook, or one that reduces in the policy's dtype if gradients have another dtype."""
        config.register_comm_hook(wrapped, self.session.group)
        wanted = self.policy.reduce
        dtypes = {parameter.dtype for parameter in wrapped.parameters() if parameter.requires_grad}
        if wanted is None or dtypes == {wanted}:
            return
        if hook_name(config.comm_hook) != "no":
            raise ConfigError(
                f"precision {self.policy.name!r} reduces gradients in {dtype_name(wanted)}, and comm_hook="
                f"{hook_name(config.comm_hook)!r} in another way; give one of them"
            )
        wrapped.register_comm_hook(self.session.group, reduce_in(wanted))


def _living(known: Iterable[ref[Kept]]) -> list[ref[Kept]]:
    return [one for one in known if one() is not None]


def _leave_out_quantized(model: nn.Module) -> None:
    """Excludes frozen quantized weights from DDP's broadcast; every rank has loaded the same."""
    found = [name for name, parameter in model.named_parameters() if is_quantized(parameter)]
    if found:
        leave_out_of_ddp(model, found)


@contextmanager
def _synchronising(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    # The preparation that DDP.forward does outside of ``no_sync``; torch has no public name for it. With
    # find_unused_parameters the search needs the loss, so ``backward`` does it.
    prepared = model.require_forward_param_sync is True
    if torch.is_grad_enabled() and not prepared and not model.find_unused_parameters:
        model.reducer.prepare_for_backward([])
        model.require_forward_param_sync = True
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


@contextmanager
def _averaging(reductions: Iterable[BareReduction], synchronising: bool) -> Iterator[None]:
    before = [(one, one.synchronising) for one in reductions]
    for one, _ in before:
        one.synchronising = synchronising
    try:
        yield
    finally:
        for one, was in before:
            one.synchronising = was


def _check_full(model: nn.Module) -> None:
    for name, parameter in named_parameters(model).items():
        if hasattr(parameter, "device_mesh"):
            raise PrepareError(
                f"{name} is a DTensor on {parameter.device_mesh}, and backend 'ddp' keeps full parameters on every "
                "rank; use a backend that composes with sharded ones (fsdp)"
            )
