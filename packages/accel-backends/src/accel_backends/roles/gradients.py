"""Role of a backend: gradients between backward and step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.clip import Pieces, clip_grad_norm, clip_grad_value, finite, norm_of_held, scale_gradients
from accel_backends.ops.fqn import named_parameters, sparse_embeddings
from accel_backends.ops.loss_scaling import check_scaled
from accel_backends.roles.lost_step import lost_if_failed
from accel_backends.roles.nearest import nearest_strategy
from accel_precision.scaler import gradient_marks
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_backends.core.backend import Backend

NOTHING: AbstractContextManager[None] = nullcontext()
#: Receives this rank's gradients (or shards of them) by the ids of the model's parameters.
Keep = Callable[[dict[int, torch.Tensor]], None]


class ReplicatedGradients:
    """Gradients in the ``grad`` of parameters, full on each rank; base of the gradients of other backends.

    The methods measure, change, save and observe gradients between backward and step.

    Attributes:
        ranks: number of ranks over which gradients are averaged.
        run: processes and options of the backend.
        name: name of the backend, for errors.
        owned: the models that the backend has prepared.
        loss_scale: loss scale of fp16 that the gradients carry; None without one.
    """

    def __init__(self, backend: "Backend", *, ranks: int = 1) -> None:
        """Takes what it needs from a backend whose loss scale is known."""
        self.ranks = ranks
        self.run, self.name, self.capabilities = backend.run, backend.name, backend.capabilities
        self.owned, self.loss_scale = backend.owned, backend.loss_scale

    @property
    def group(self) -> "ProcessGroup | None":
        """Process group over which gradients are averaged; None: torch's default group. Default: the session's."""
        return self.run.session.group

    @property
    def pieces(self) -> Pieces | None:
        """Mesh and mesh dimensions over which plain gradients are sharded. Default: None, gradients are full."""
        return None

    # Measured and changed

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides gradients by the loss scale, once per optimizer and step. Default: if there is a scale.

        Raises:
            BackendError: gradients of a loss that was not scaled.
        """
        if self.loss_scale is not None:
            for optimizer in optimizers:
                check_scaled(self.loss_scale, optimizer, self.owned.names)
                self.loss_scale.unscale(optimizer)

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clips unscaled gradients to a joint norm over all ranks and returns that norm, see ``clip.clip_grad_norm``.

        Raises:
            BackendError: parameters of no prepared model.
        """
        return clip_grad_norm(
            self.owned.checked(parameters, added=not self._spread),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            names=self.owned.names,
            pieces=self.pieces,
        )

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the norm of this rank's unreduced gradients, without the loss scale; changes no gradient.

        Default: the norm of ``unreduced`` of these parameters.

        Collective: every rank of the group must call this.
        """
        if type(self).unreduced is ReplicatedGradients.unreduced:
            norm = self.clip_norm(parameters, math.inf, norm_type)
        else:
            held = [(named_parameters(model), self.unreduced(model)) for model in models]
            norm = norm_of_held(held, parameters, norm_type)
        return norm if self.loss_scale is None else norm / self.loss_scale.current

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps unscaled gradients to ``[-clip_value, clip_value]``.

        Raises:
            BackendError: parameters of no prepared model.
        """
        clip_grad_value(self.owned.checked(parameters, added=not self._spread), clip_value)

    def scale(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
        """Multiplies the accumulated gradients, those of tied parameters once. Default: ``grad`` of the parameters."""
        scale_gradients(models, factor)

    def finite(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Whether all of this rank's elements of each gradient are finite; synchronises with the device."""
        return finite(gradients)

    # Saved and observed

    def marks(self, model: nn.Module) -> object:
        """Returns a value that changes when a backward adds to the model's gradients.

        Default: ids and versions of ``grad``.
        """
        return gradient_marks(model.parameters())

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns this rank's unreduced gradients as full tensors, by FQN.

        Their mean over ``ranks`` is the gradient. Default: ``grad`` of the parameters; dense copies of sparse ones.

        Collective: every rank of the group must call this.
        """
        found = {name: p.grad for name, p in named_parameters(model).items() if p.grad is not None}
        return {name: one.to_dense() if one.is_sparse else one for name, one in found.items()}

    def outside_grad(self, model: nn.Module) -> bool:
        """Whether the model has gradients that are not in ``grad`` of its parameters. Default: False."""
        return False

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restores the gradients that ``unreduced`` returned, or any gradients with the same mean over ranks.

        Collective: every rank of the group must call this.
        """
        sparse = {id(module.weight) for _, module in sparse_embeddings(model)}
        for name, parameter in named_parameters(model).items():
            held = gradients.get(name)
            parameter.grad = None if held is None else held.to(parameter.device, parameter.dtype)
            if parameter.grad is not None and id(parameter) in sparse:
                parameter.grad = parameter.grad.to_sparse(1)  # of the rows that have one

    def reduce(self, model: nn.Module) -> None:
        """Averages over ranks the gradients that no backward has reduced; reduced ones do not change.

        Default: nothing, for gradients of one rank.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: the backend reduces gradients in a backward only.
        """
        if self.ranks > 1:
            raise BackendError(
                "the last micro-batch of an accumulation window had no backward, and backend "
                f"{self.name!r} reduces gradients in that backward only; nearest: drop the window by zero_grad() in "
                "place of step(), a backward of every batch, or strategy='ddp' or 'fsdp'"
            )

    def drop(self, model: nn.Module) -> None:
        """Drops this rank's gradients, reduced or not. Default: ``grad`` of the parameters."""
        for parameter in model.parameters():
            parameter.grad = None

    def clear_unreduced(self, optimizer: Optimizer) -> None:
        """Drops unreduced gradients of the optimizer's parameters that its ``zero_grad`` does not know.

        Default: nothing, because unreduced gradients are in ``grad``.
        """

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns copies of the next step's gradients as full tensors, by FQN, without the backend's own loss scale.

        To be called after the last backward of an accumulation window. Default: copies of ``unreduced``.

        Collective: every rank of the group must call this.
        """
        return {name: held.detach().clone() for name, held in self.unreduced(model).items()}

    def watch(self, optimizer: Optimizer, keep: Keep) -> RemovableHandle:
        """Calls ``keep`` with this rank's gradients before each step. Default: ``grad`` of the parameters."""
        return watch_steps(optimizer, keep)

    # Over ranks

    def trial(self, model: nn.Module, agree: Callable[[], None]) -> AbstractContextManager[Any]:
        """Context, within ``no_sync``, of a forward and backward of ``model`` that may fail on some ranks.

        ``agree`` is called before each collective, and raises if a rank has failed. Default: models that are not
        sharded have no collectives there; a failure of one that is sharded cannot be recovered from.

        Raises:
            LostStepError: the model is sharded, and the step failed; other ranks may wait in a collective.
        """
        return lost_if_failed(self.name) if self.capabilities.sharded else NOTHING

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises BackendError for a parameter group whose gradients would not be averaged over ranks."""
        if self._spread:
            self.owned.check_added(group["params"])

    @property
    def _spread(self) -> bool:
        """Whether parameters that a model has gained since it was prepared would not train as the others."""
        return self.ranks > 1 or self.capabilities.sharded

    def join(self, models: Sequence[nn.Module], *, enable: bool = True) -> AbstractContextManager[Any]:
        """Context in which ranks may have different numbers of batches. Default: a null context, for one replica.

        Raises:
            BackendError: several ranks and a backend without ``uneven_inputs``, with which some ranks would wait
                forever.
        """
        if enable and models and self.ranks > 1 and not self.capabilities.uneven_inputs:
            raise BackendError(
                f"join: with backend {self.name!r} every rank takes part in every forward and backward, so ranks "
                "cannot have different numbers of batches; nearest: even_batches=True (samples are repeated, and "
                "gather_for_metrics leaves the repeats out), drop_last=True, or "
                f"{nearest_strategy(self.run, lambda other: other.uneven_inputs)}"
            )
        return NOTHING

    def average_parameters(self, model: nn.Module) -> None:
        """Replaces parameters by their mean over ranks (local SGD). Default: nothing, because there is one replica.

        Raises:
            BackendError: parameters are sharded, so that no rank can train alone.
        """
        if self.capabilities.sharded and self.ranks > 1:
            raise BackendError(
                f"backend {self.name!r} spreads parameters over ranks, and local SGD has each rank train a copy of its "
                f"own; nearest: {nearest_strategy(self.run, lambda other: not other.sharded)}"
            )


def watch_steps(optimizer: Optimizer, keep: Keep) -> RemovableHandle:
    """Calls ``keep`` with the ``grad`` of the optimizer's parameters before each step; for torch's optimizers."""

    def before(stepping: Optimizer, args: object, kwargs: object) -> None:
        parameters = [one for group in stepping.param_groups for one in group["params"]]
        keep({id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None})

    return optimizer.register_step_pre_hook(before)
