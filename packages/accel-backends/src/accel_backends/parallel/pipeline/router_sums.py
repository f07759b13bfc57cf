"""Load-balancing loss of routers whose layers are on several pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.parallel.router_loss import has_router_loss, router_totals


@final
@dataclass(frozen=True, slots=True)
class Routers:
    """Numbers of experts and of the choices for each token, and the coefficient of the load-balancing loss."""

    experts: int
    choices: int
    coefficient: float

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Those of a transformers model; None if it has no load-balancing loss that is known."""
        if not has_router_loss(model):
            return None
        known = cast(Any, model)
        return cls(known.num_experts, known.num_experts_per_tok, float(known.router_aux_loss_coef))


@final
class RouterSums:
    """Sums over the tokens of one batch, from which the load-balancing loss of all stages follows.

    The loss is that of ``load_balancing_loss`` for the tokens of all micro-batches, layers and ranks. It sums products
    of means, so that the gradient of each micro-batch needs the choices of all of them. ``sum`` therefore has to be
    called between the last forward and the first backward of all stages, an instant that only GPipe has.

    Args:
        routers: those of the model.
        groups: groups over which sums are summed, one after the other; None: the default group.
        scale: factor of the gradients of the loss: the loss scale times the number of ranks that average gradients.
        device: where sums are added up.
    """

    def __init__(
        self,
        routers: Routers,
        groups: Sequence[dist.ProcessGroup | None],
        *,
        scale: float = 1.0,
        device: torch.device,
    ) -> None:
        self._routers, self._groups, self._scale, self._device = routers, groups, scale, device
        # By number, because a micro-batch may be computed twice: torch finds shapes by a forward of the first one.
        self._totals: dict[int, torch.Tensor] = {}
        self._loss: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def attach(self, number: int, result: torch.Tensor, output: Any, mask: Any) -> torch.Tensor:
        """Adds the choices of a micro-batch; returns the result of the stage, whose backward adds the gradient.

        Args:
            number: of the micro-batch.
            result: what the stage sends, or its loss.
            output: output of the model, with ``router_logits`` of the layers of the stage.
            mask: 1 for tokens that count, 0 for padding, of as many elements as there are tokens; None: all count.
        """
        logits = getattr(output, "router_logits", None) or ()
        if not logits:
            return result
        choices, probabilities, count = router_totals(logits, top_k=self._routers.choices, mask=mask)
        self._totals[number] = torch.cat([choices, probabilities.detach(), count])
        attached: torch.Tensor = _Attached.apply(result, probabilities, self)  # type: ignore[no-untyped-call]
        return attached

    def sum(self) -> None:
        """Sums over the ranks of all groups.

        Collective: every rank of the groups must call this.
        """
        experts = self._routers.experts
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        total = torch.zeros(2 * experts + 1, dtype=wide, device=self._device)
        for one in self._totals.values():
            total += one
        for group in self._groups:
            dist.all_reduce(total, group=group)
        share, mean = total[:experts] / total[-1], total[experts:-1] / total[-1]
        self._loss = experts * (share * mean).sum()
        self._gradient = share * (self._routers.coefficient * experts * self._scale) / total[-1]

    @property
    def loss(self) -> torch.Tensor:
        """The load-balancing loss after ``sum`` (float64, scalar), the same on every rank; without gradients."""
        assert self._loss is not None
        return self._loss

    @property
    def weighted_loss(self) -> torch.Tensor:
        """The part of the model's loss, with the coefficient."""
        return self.loss * self._routers.coefficient

    def gradient(self) -> torch.Tensor | None:
        """With respect to the sums of probabilities; None before ``sum``, while torch finds shapes."""
        return self._gradient


class _Attached(torch.autograd.Function):
    """The identity of its first input, whose backward gives the second one its gradient of the load-balancing loss."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, probabilities: torch.Tensor, sums: RouterSums) -> torch.Tensor:
        ctx.sums, ctx.dtype = sums, probabilities.dtype
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient = ctx.sums.gradient()
        return grads[0], None if gradient is None else gradient.to(ctx.dtype), None
