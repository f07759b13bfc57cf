"""Backend with a full replica on every rank, whose gradients DistributedDataParallel averages."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_backends.core.backend import _NOTHING, Backend
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.ddp.averaging import average_tensors
from accel_backends.ddp.comm_hooks import DDPCommunicationHookType, hook_name, reduce_in, register_comm_hook
from accel_backends.ddp.reduction import Reduction
from accel_backends.ops.fqn import named_parameters, wrapped_name
from accel_precision.policy import dtype_name
from accel_state.errors import ConfigError, PrepareError


@dataclass(slots=True)
class DDPConfig(BackendConfig):
    """Options of DistributedDataParallel, under its own names, and of the reduction of gradients.

    Attributes:
        dim: batch dimension (torch's option, without effect here).
        broadcast_buffers: broadcast rank 0's buffers before each forward.
        bucket_cap_mb: size of the gradient buckets, MiB.
        find_unused_parameters: search in each forward for parameters that will get no gradient, so that their buckets
            do not delay others; faster if most steps leave parameters out, slower otherwise. Gradients are the same
            either way.
        check_reduction: accepted, without effect in torch.
        gradient_as_bucket_view: make gradients views of the buckets, which saves one copy of them.
        static_graph: promise that every step runs the same graph.
        comm_hook: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: "no", "fp16" or "bf16": dtype around a PowerSGD hook.
        comm_state_option: options of ``PowerSGDState``.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``; takes precedence if given.
        init_sync: on wrapping, verify that parameters agree in shape, and broadcast rank 0's values.
        sync_batch_norm: compute batch statistics over all ranks.
    """

    backend: ClassVar[str] = "ddp"
    needs_ranks: ClassVar[bool] = True

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        hook, wrapper = hook_name(self.comm_hook), hook_name(self.comm_wrapper, "comm_wrapper")
        if wrapper != "no" and hook in ("no", wrapper):
            raise ConfigError(f"comm_wrapper={wrapper!r} around comm_hook={hook!r}: use comm_hook={wrapper!r} alone")
        if self.comm_state_option and "power_sgd" not in hook:
            raise ConfigError(f"comm_state_option is for comm_hook 'power_sgd' or 'batched_power_sgd', not {hook!r}")
        if not self.bucket_cap_mb > 0:
            raise ConfigError(f"bucket_cap_mb is {self.bucket_cap_mb}; expected a size in MiB above 0")

    @property
    def syncs_buffers(self) -> bool:
        """Whether each forward starts from rank 0's buffers; resolves the option's two names."""
        return self.broadcast_buffers if self.forward_sync_buffers is None else self.forward_sync_buffers

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``DistributedDataParallel``, by the names in the installed torch.

        Contains only values that differ from the defaults: if torch is given its own default of 25 MiB, it omits the
        small first bucket with which communication starts early.
        """
        arguments: dict[str, Any] = {
            name: value
            for name, value in self.to_kwargs().items()
            if name
            in (
                "dim",
                "bucket_cap_mb",
                "find_unused_parameters",
                "gradient_as_bucket_view",
                "static_graph",
                "init_sync",
            )
        }
        newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
        arguments["forward_sync_buffers" if newer else "broadcast_buffers"] = self.syncs_buffers
        return arguments

    def register_comm_hook(self, model: DistributedDataParallel, group: Any = None) -> None:
        """Registers the configured communication hook on a DDP model; does nothing for ``"no"``."""
        hook, wrapper = hook_name(self.comm_hook), hook_name(self.comm_wrapper, "comm_wrapper")
        register_comm_hook(model, hook, wrapper, self.comm_state_option, group=group)


DistributedDataParallelKwargs = DDPConfig


@final
class DDPBackend(Backend):
    """Wraps trainable models in DistributedDataParallel; frozen models stay bare, because they have no gradients."""

    name: ClassVar[str] = "ddp"
    Config: ClassVar[type[BackendConfig]] = DDPConfig
    capabilities: ClassVar[Capabilities] = Capabilities(uneven_inputs=True, loads_in_place=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reductions: list[Reduction] = []

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Wraps the model in DDP; returns ``model`` if it is frozen or in DDP already, or if there is only one rank.

        Raises:
            PrepareError: parameters are sharded already (DTensors).
        """
        bare = not any(parameter.requires_grad for parameter in model.parameters())
        if bare or self.session.world_size == 1:
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
        gone = [find_ddp(model) for model in models]
        self._reductions[:] = [one for one in self._reductions if one.model not in (None, *gone)]
        super().release(models)

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """As on one device; afterwards the gradients of every synchronising model are means over ranks."""
        for reduction in self._reductions:
            reduction.prepare(loss)
        super().backward(loss, scale=scale, **kwargs)
        for reduction in self._reductions:
            reduction.finish()

    @property
    def gradient_average(self) -> int:
        """World size of the session."""
        return self.session.world_size

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """DDP's ``no_sync``: gradients accumulate on each rank until a backward outside of the context reduces them.

        With ``static_graph`` the first backward reduces nevertheless, because torch records the graph in it. The result
        is the same, because the mean over ranks of that mean and later gradients is the mean of all.
        """
        wrapped = find_ddp(model)
        if wrapped is None:
            return _NOTHING
        if wrapped.static_graph and not any(one.recorded for one in self._reductions if one.model is wrapped):
            return _NOTHING
        return wrapped.no_sync()

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context that prepares DDP's reducer for a backward whose forward ran under ``no_sync``."""
        wrapped = find_ddp(model)
        return _NOTHING if wrapped is None else _synchronising(wrapped)

    def join(self, models: Sequence[nn.Module], *, enable: bool = True) -> AbstractContextManager[Any]:
        """torch's Join over the DDP models; afterwards weights, optimizers and loss scale are equal on all ranks."""
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        if not wrapped or not enable:
            return _NOTHING
        from accel_backends.ddp.uneven_inputs import joined

        held = {id(parameter) for model in wrapped for parameter in model.parameters()}
        optimizers = [
            o
            for known in self._optimizers
            if (o := known()) is not None and any(id(p) in held for g in o.param_groups for p in g["params"])
        ]
        return joined(wrapped, optimizers, self.scaler)

    def average_parameters(self, model: nn.Module) -> None:
        """Averages the trainable parameters with one all-reduce per dtype and device."""
        tensors = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
        average_tensors(tensors, self.session.group)

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Copies rank 0's buffers to every rank, as DDP's next forward would.

        Nothing if ``broadcast_buffers`` is off.
        """
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        buffers = [buffer for model in wrapped for buffer in model.buffers()]
        if buffers and cast(DDPConfig, self.config).syncs_buffers:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.session.group)

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


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP wrapper around a model, also within other wrappers (torch.compile); None without one."""
    while not isinstance(model, DistributedDataParallel):
        name = wrapped_name(model)
        if name is None:
            return None
        model = cast(nn.Module, model._modules[name])
    return model


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


def _check_full(model: nn.Module) -> None:
    for name, parameter in named_parameters(model).items():
        if hasattr(parameter, "device_mesh"):
            raise PrepareError(
                f"{name} is a DTensor on {parameter.device_mesh}, and backend 'ddp' keeps full parameters on every "
                "rank; use a backend that composes with sharded ones (fsdp)"
            )
