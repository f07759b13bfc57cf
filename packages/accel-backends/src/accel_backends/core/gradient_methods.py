"""Methods of a backend about gradients: which ranks they are averaged over, clipping, scaling and watching them."""

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
    """The part of ``Backend`` that measures and changes gradients between backward and step.

    Attributes:
        scaler: the loss scale of fp16; None where there is none or the backend has its own.
    """

    scaler: LossScaler | None
    _owned: Ownership

    @property
    def gradient_average(self) -> int:
        """Over how many ranks gradients are averaged. Default: 1."""
        return 1

    @property
    def gradient_group(self) -> "ProcessGroup | None":
        """The ranks that gradients are averaged over; None: torch's default group. Default: the session's."""
        return self.session.group

    @property
    def gradient_pieces(self) -> Pieces | None:
        """What plain gradients are spread over where every rank holds other pieces. Default: they are whole."""
        return None

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides gradients by the loss scale, once for each optimizer in a step. Default: if there is a scaler.

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
        """The norm of this rank's gradients in an accumulation window that is still open, without the loss scale.

        Collective; changes no gradient. Default: the norm of ``unreduced_gradients`` of these parameters.
        """
        if type(self).unreduced_gradients is BackendStates.unreduced_gradients:
            norm = self.clip_grad_norm(parameters, math.inf, norm_type)
        else:
            held = [(named_parameters(model), self.unreduced_gradients(model)) for model in models]
            norm = norm_of_held(held, parameters, norm_type)
        return norm if self.scaler is None else norm / self.scaler.current

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limits unscaled gradients element by element.

        Raises:
            BackendError: parameters of no prepared model.
        """
        clip_grad_value(self._owned.checked(parameters), clip_value)

    def scale_gradients(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
        """Multiplies what the models have accumulated, a tied parameter's once. Default: what parameters hold."""
        scale_gradients(models, factor)

    def watch_gradients(self, optimizer: Optimizer, keep: Keep) -> RemovableHandle:
        """Calls ``keep`` before each step with this rank's parts of the gradients. Default: as parameters hold them."""
        return watch_steps(optimizer, keep)

    def finite(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Whether all elements of each that are here are finite; waits for the device."""
        return finite(gradients)
