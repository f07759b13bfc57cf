"""Base class of backends: everything that differs between one device and many."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.bundle import Bundle
from accel_backends.core.capabilities import Capabilities
from accel_backends.core.config import BackendConfig
from accel_backends.core.ownership import Ownership
from accel_backends.core.run import Run
from accel_backends.ops.backward import ScaledBackward, explain
from accel_backends.ops.compile import TorchDynamoPlugin, compile_model, refuse_cuda_graphs, unwrap
from accel_backends.ops.fqn import innermost
from accel_backends.ops.loss_scaling import scaled_backward, scaled_step
from accel_backends.roles.gradients import NOTHING, ReplicatedGradients
from accel_backends.roles.layout import ReplicatedLayout
from accel_backends.roles.states import ReplicatedStates
from accel_precision.autocast import restore_module
from accel_precision.scaler import LossScaler, make_scaler
from accel_state.collectives.group_argument import is_fake
from accel_state.errors import BackendError
from accel_state.watchdog.decorator import recorded


class GradientReduction(Protocol):
    """Reduction of the gradients of one model in each backward."""

    def prepare(self, loss: torch.Tensor) -> None: ...
    def finish(self) -> None: ...


class Backend(ABC):
    """Preparation, synchronisation and optimizer steps of models, with roles for what is measured and saved between.

    The defaults are those of training on one device. A backend overrides the methods in which it differs, and replaces
    the roles in which it differs at the end of its ``__init__``. Backends that wrap one model at a time extend
    ``ModuleBackend``. Concrete backends are final and found by entry points (group ``accel.backends``).

    Attributes:
        name: name of the backend's entry point.
        Config: class of the backend's options.
        named_options: values of options that the backend's name implies.
        capabilities: features that the backend supports.
        run: processes, precision and degrees of parallelism that the backend was opened for.
        session: the run's processes and device.
        policy: the run's precision.
        device: the run's device, as torch names it.
        config: the backend's options.
        owned: the prepared models, and their parameters.
        loss_scale: loss scale of fp16; None without one, or if the backend has its own.
        layout: how models and samples are split over ranks.
        gradients: gradients between backward and step.
        states: states of models and optimizers.
    """

    name: ClassVar[str]
    Config: ClassVar[type[BackendConfig]] = BackendConfig
    named_options: ClassVar[Mapping[str, Any]] = {}
    capabilities: ClassVar[Capabilities] = Capabilities()

    loss_scale: LossScaler | None
    layout: ReplicatedLayout
    gradients: ReplicatedGradients
    states: ReplicatedStates

    def __init__(self, run: Run, config: BackendConfig | None = None) -> None:
        """Opens the backend for a run.

        Raises:
            BackendError: a device, precision or number of processes that the backend does not support, with the nearest
                that it does; or options of another backend.
        """
        config = build_options(type(self), {}) if config is None else config
        if not isinstance(config, self.Config):
            raise BackendError(f"backend {self.name!r} takes {self.Config.__name__}, and got {type(config).__name__}")
        session = run.session
        reason = self.capabilities.refusal(self.name, run.policy, session.device.type, session.world_size)
        if reason is not None:
            raise BackendError(reason)
        if run.activation_checkpointing is not None and self.capabilities.instead_of_recomputing is not None:
            raise BackendError(
                f"backend {self.name!r} does not apply activation_checkpointing; leave it out, and "
                f"{self.capabilities.instead_of_recomputing}"
            )
        if self.capabilities.not_alone_because is not None and is_fake(session.group):
            raise BackendError(
                f"backend {self.name!r} cannot run as one rank of {session.world_size} without the others: "
                f"{self.capabilities.not_alone_because}; nearest: strategy='fsdp' on a CPU or GPU"
            )
        self.run, self.session, self.policy, self.config = run, session, run.policy, config
        self.device: torch.device = session.device.torch
        self.owned = Ownership()
        self._reductions: Sequence[GradientReduction] = ()  # prepared before each backward, finished after it
        self._backward = ScaledBackward()
        self.loss_scale = _loss_scale_of(run)
        self.layout = ReplicatedLayout(run)
        self.gradients = ReplicatedGradients(self)
        self.states = ReplicatedStates(self)

    @abstractmethod
    def prepare(self, bundle: Bundle) -> Bundle:
        """Prepares a bundle: same order and lengths in the result, optimizers bound to the parameters of its models.

        Every rank prepares the same bundle; if one rank fails, all raise.

        Collective: every rank of the group must call this.

        Raises:
            PrepareError: see ``check_bundle``; ranks prepare models or optimizers that differ.
        """

    def compile(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compiles a prepared model. Default: repeated blocks in place, or the full model in torch's wrapper.

        Raises:
            BackendError: CUDA graphs, of a backend that shards parameters.
        """
        if self.capabilities.sharded and self.device.type == "cuda":
            refuse_cuda_graphs(plugin, self.name)
        return compile_model(model, plugin)

    def unwrap(self, model: nn.Module, *, keep_torch_compile: bool = True) -> nn.Module:
        """Returns the user's own module, still compiled if it was and ``keep_torch_compile``; idempotent."""
        return unwrap(model, keep_torch_compile=keep_torch_compile)

    def release(self, models: Iterable[nn.Module]) -> None:
        """Drops prepared models, and restores the classes of their modules, so that they can be prepared again.

        Modules that ``fully_shard`` was called on keep the class that it gave them.
        """
        for model in models:
            for module in innermost(model).modules():
                restore_module(module)
            self.owned.drop(model)
        self._backward.clear()

    def close(self) -> None:
        """Releases everything that the backend holds. Default: all prepared models."""
        self.release(list(self.owned.models))
        self.owned.clear()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward does not reduce the gradients of ``model``.

        Default: there is no reduction to skip.
        """
        return NOTHING

    def trigger_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward reduces gradients although forward ran under ``no_sync``. Default: no reduction."""
        return NOTHING

    def backward(self, loss: torch.Tensor, *, scale: float = 1.0, **kwargs: Any) -> None:
        """Computes the gradients of ``scale`` times ``loss``, times the loss scale of fp16.

        ``kwargs`` go to ``torch.Tensor.backward``.

        Raises:
            BackendError: a loss that is no scalar or has no graph.
            PrecisionError: gradients that carry the loss scale were added to ones from which it had been removed.
        """
        for reduction in self._reductions:
            reduction.prepare(loss)
        if self.loss_scale is not None:
            scaled_backward(self.loss_scale, lambda factor: self._backward(loss, scale * factor, kwargs))
        else:  # as ``ScaledBackward``, without its frame
            try:
                scaled, arguments = (loss, kwargs) if scale == 1.0 else self._backward.scaled(loss, scale, kwargs)
                scaled.backward(**arguments)
            except (RuntimeError, AttributeError) as error:
                explain(loss, kwargs, error)
                raise
        for reduction in self._reductions:
            reduction.finish()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Steps the optimizer; returns False if all ranks skipped the step because gradients overflowed.

        Raises:
            BackendError: there is a loss scale, and the gradients are of a loss that was not scaled.
        """
        if self.loss_scale is not None:
            return scaled_step(self.loss_scale, optimizer, closure, names=self.owned.names)
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clears gradients. Default: calls the optimizer's ``zero_grad``."""
        optimizer.zero_grad(set_to_none=set_to_none)
        if self.loss_scale is not None:
            self.loss_scale.forget(optimizer)


def build_options(backend: type[Backend], values: Mapping[str, Any]) -> BackendConfig:
    """Returns a backend's options from a mapping of their fields, with those that the backend's name implies."""
    return backend.Config.build({**backend.named_options, **values})


def _loss_scale_of(run: Run) -> LossScaler | None:
    """Returns the loss scale of a run's precision; an overflow on any rank of the session counts on all ranks."""
    session = run.session

    @recorded("unscale", shared=False)
    def sum_over_ranks(tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        total = tensor.to(session.device.own_numbers)  # the same on a rank whose optimizer has no parameters
        dist.all_reduce(total, group=session.group)
        tensor.copy_(total)

    return make_scaler(run.policy, run.scaler, reduce=sum_over_ranks if session.world_size > 1 else None)
