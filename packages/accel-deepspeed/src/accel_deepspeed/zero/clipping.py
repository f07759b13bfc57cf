"""Norms and clipping of an engine's accumulated gradients, of all parameters or some of them."""

from typing import TYPE_CHECKING, final

import torch

from accel_backends.ops.clip import norm_over
from accel_backends.private import norms_of
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_deepspeed.engine.engine import Prepared
    from accel_deepspeed.zero.gradients import Gradients


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
        device = gradients.engine.device
        norms = norms_of(self._pieces, norm_type, torch.float32)
        here = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
        total = torch.linalg.vector_norm(here, norm_type)
        if gradients.spread and dist.get_world_size(gradients.group) > 1:
            total = norm_over([gradients.group], total, norm_type)
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


def check_clip(prepared: "Prepared", max_norm: float, *, usual: bool) -> None:
    """Raises BackendError for a clip that conflicts with ``gradient_clipping`` of the configuration."""
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
