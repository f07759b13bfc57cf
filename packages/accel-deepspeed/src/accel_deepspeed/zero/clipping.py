"""Norms and clipping of an engine's accumulated gradients, of all parameters or some of them."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from accel_backends.core.gradient_methods import BackendGradients
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_deepspeed.engine.engine import Prepared
    from accel_deepspeed.engine.registry import Engines
    from accel_deepspeed.zero.gradients import Factor, Gradients

_NORM, _VALUE = "clip_grad_norm_", "clip_grad_value_"


class ZeroClipping(BackendGradients):
    """Base of the backend that measures and clips gradients, which are partitioned over ranks from stage 1 on."""

    device: torch.device
    _engines: "Engines"

    def scale_gradients(self, models: Iterable[nn.Module], factor: "Factor") -> None:
        """Multiplies the accumulated gradients of engines, unreduced ones before their reduction."""
        for model in models:
            prepared = self._engines.find(model)
            if prepared is not None and prepared.gradients is not None and prepared.gradients.filled:
                prepared.gradients.scale(factor)

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clips to ``max_norm`` and returns the norm over all ranks before clipping.

        The 2-norm of all parameters is clipped in the engine's next step, other norms and subsets of parameters at
        once.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: a norm that is not positive; parameters of no engine or of several; a clip that conflicts with
                ``gradient_clipping`` of the configuration; another norm or a subset of parameters together with
                experts, tensor parallelism, Muon, or gradients on disk.
        """
        if not norm_type > 0.0:
            raise BackendError(f"norm_type is {norm_type}; expected a positive number or inf")
        prepared, chosen = self._engines.of_parameters(parameters, self._owned, _NORM)
        gradients = prepared.gradients
        assert gradients is not None
        limited = max_norm != math.inf
        usual = norm_type == 2 and chosen is None
        if limited:
            _check_stated(prepared, max_norm, usual=usual)
        if not gradients.filled:
            return torch.zeros((), device=self.device)
        part = None if usual else PartOfGradients(gradients, chosen, _NORM)
        norm = gradients.norm() if part is None else part.norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise BackendError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite is set")
        if limited and part is None:
            gradients.clip(max_norm, norm)
        elif limited and part is not None:
            part.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """As every backend, divided by the engine's own loss scale.

        Raises:
            BackendError: parameters of no engine or of several.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        prepared, _ = self._engines.of_parameters(parameters, self._owned, _NORM)
        assert prepared.gradients is not None
        return super().norm_so_far(parameters, models, norm_type) / prepared.gradients.loss_scale

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps the gradients that this rank's optimizer updates.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: a negative limit; parameters of no engine or of several; gradients on disk (nvme).
        """
        if not clip_value >= 0.0:
            raise BackendError(f"clip_value is {clip_value}; expected a number >= 0")
        prepared, chosen = self._engines.of_parameters(parameters, self._owned, _VALUE)
        if prepared.gradients is not None and prepared.gradients.filled:
            PartOfGradients(prepared.gradients, chosen, _VALUE).limit(clip_value)


@final
class PartOfGradients:
    """Reduced gradients of some parameters of an engine, as its next step uses them; the constructor is a collective.

    Collective: every rank of the group must call this.

    Args:
        gradients: the engine's gradients, after at least one backward.
        chosen: ids of the parameters; None: all.
        what: name of the user's call, for errors.

    Raises:
        BackendError: the gradients are on disk, or the optimizer has replaced them by its updates (Muon).
    """

    def __init__(self, gradients: "Gradients", chosen: frozenset[int] | None, what: str) -> None:
        self._gradients, self._what = gradients, what
        gradients.settle()
        pieces = gradients.pieces(what)
        gradients.clip_now()
        wanted = pieces if chosen is None else chosen & pieces.keys()
        self._pieces = [pieces[key] for key in wanted if pieces[key].numel()]

    def norm(self, norm_type: float) -> torch.Tensor:
        """Returns the joint norm over all ranks, without the loss scale; inf if it is not finite.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: some elements are replicated, and others are on one rank only.
        """
        import torch.distributed as dist

        gradients = self._gradients
        if gradients.uneven:
            raise BackendError(
                f"{self._what} of some parameters, or to another norm than 2, of a model with {gradients.uneven}, of "
                "which ranks hold different parts; nearest: all parameters with norm_type=2"
            )
        largest = norm_type == math.inf
        device = gradients.engine.device
        norms = torch._foreach_norm(self._pieces, norm_type, dtype=torch.float32) if self._pieces else []
        here = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
        total = torch.linalg.vector_norm(here, norm_type)
        if gradients.spread and dist.get_world_size(gradients.group) > 1:
            total = total if largest else total**norm_type
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=gradients.group)
            total = total if largest else total ** (1.0 / norm_type)
        finite: torch.Tensor = total.nan_to_num_(torch.inf, torch.inf) / gradients.loss_scale
        return finite

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the gradients in place."""
        for piece in self._pieces:
            piece.mul_(factor.to(piece.device, piece.dtype))
        self._gradients.changed()

    def limit(self, value: float) -> None:
        """Clamps each element in place; the limit is multiplied by the loss scale."""
        bound = value * self._gradients.loss_scale
        for piece in self._pieces:
            piece.clamp_(-bound, bound)
        self._gradients.changed()


def _check_stated(prepared: "Prepared", max_norm: float, *, usual: bool) -> None:
    """Refuses a clip that conflicts with ``gradient_clipping`` of the configuration.

    Raises:
        BackendError: see the messages.
    """
    stated, origin = prepared.clip
    if not stated or (usual and stated == max_norm):
        return
    if usual:
        raise BackendError(
            f"clip_grad_norm_ was given max_norm={max_norm}, and gradient_clipping is {stated} ({origin}); make "
            "them agree, or let the DeepSpeed config say 'auto'"
        )
    raise BackendError(
        f"clip_grad_norm_ of some parameters, or to another norm than 2, and gradient_clipping is {stated} ({origin}), "
        "by which the engine clips all of them in its step; let the DeepSpeed config say 'auto'"
    )
