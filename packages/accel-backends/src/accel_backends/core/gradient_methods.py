"""Methods of a backend about gradients: averaging group, clipping, scaling, observation."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_backends.core.ownership import Ownership
from accel_backends.core.state_methods import BackendStates
from accel_backends.ops.clip import Pieces, clip_grad_norm, clip_grad_value, finite, norm_of_held, scale_gradients
from accel_backends.ops.fqn import named_parameters
from accel_backends.ops.gradient_observer import Keep, watch_steps
from accel_backends.ops.loss_scaling import check_scaled
from accel_precision.scaler import LossScaler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BackendGradients(BackendStates):
    """Base of ``Backend`` that measures and changes gradients between backward and step.

    Attributes:
        scaler: loss scale of fp16; None without one, or if the backend has its own.
    """

    scaler: LossScaler | None
    _owned: Ownership

    @property
    def gradient_average(self) -> int:
        """Number of ranks over which gradients are averaged. Default: 1."""
        return 1

    @property
    def gradient_group(self) -> "ProcessGroup | None":
        """Process group over which gradients are averaged; None: torch's default group. Default: the session's."""
        return self.session.group

    @property
    def gradient_pieces(self) -> Pieces | None:
        """Mesh and mesh dimensions over which plain gradients are sharded. Default: None, gradients are full."""
        return None

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides gradients by the loss scale, once per optimizer and step. Default: if there is a scaler.

        Raises:
            BackendError: gradients of a loss that was not scaled.
        """
        if self.scaler is not None:
            for optimizer in optimizers:
                check_scaled(self.scaler, optimizer, self._owned.names)
                self.scaler.unscale(optimizer)

    def clip_grad_norm(
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
            self._owned.checked(parameters),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            names=self._owned.names,
            pieces=self.gradient_pieces,
        )

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the norm of this rank's unreduced gradients, without the loss scale; changes no gradient.

        Default: the norm of ``unreduced_gradients`` of these parameters.

        Collective: every rank of the group must call this.
        """
        if type(self).unreduced_gradients is BackendStates.unreduced_gradients:
            norm = self.clip_grad_norm(parameters, math.inf, norm_type)
        else:
            held = [(named_parameters(model), self.unreduced_gradients(model)) for model in models]
            norm = norm_of_held(held, parameters, norm_type)
        return norm if self.scaler is None else norm / self.scaler.current

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps unscaled gradients to ``[-clip_value, clip_value]``.

        Raises:
            BackendError: parameters of no prepared model.
        """
        clip_grad_value(self._owned.checked(parameters), clip_value)

    def scale_gradients(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
        """Multiplies the accumulated gradients, those of tied parameters once. Default: ``grad`` of the parameters."""
        scale_gradients(models, factor)

    def watch_gradients(self, optimizer: Optimizer, keep: Keep) -> RemovableHandle:
        """Calls ``keep`` with this rank's gradients before each step. Default: ``grad`` of the parameters."""
        return watch_steps(optimizer, keep)

    def finite(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Whether all of this rank's elements of each gradient are finite; synchronises with the device."""
        return finite(gradients)
