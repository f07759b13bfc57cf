"""Gradients of a batch that the schedule has computed, held until the backward of the loss says how much they count."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from accel_backends.ops.dtensor import local_of
from accel_backends.private import multiply
from accel_state.errors import BackendError


@final
class HeldGradients:
    """Gradients of one call of a model.

    The loss that the call returns has one node as its graph. Its backward multiplies the gradients by the gradient of
    the loss, so that whatever is computed from the loss has the gradients that it has in one process.

    Args:
        parameters: trained parameters of this rank.
        scale: factor of the losses in the schedule, which the gradients carry.
        on_added: called when the gradients have been added to those of the parameters.
        check: called with the gradient of the loss before that; raises if gradients cannot be multiplied by it.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        scale: float,
        on_added: Callable[[], None],
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._held: list[torch.Tensor | None] | None = None
        self._scale, self._on_added, self._check = scale, on_added, check

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context in which backwards compute these gradients; those of before are in place again afterwards."""
        earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
            self._held = [parameter.grad for parameter in self._parameters]
        finally:
            for parameter, gradient in zip(self._parameters, earlier, strict=True):
                parameter.grad = gradient

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the loss with the node whose backward adds the gradients."""
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        with torch.enable_grad():
            result: torch.Tensor = _AddHeld.apply(anchor, value, self)  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def add(self, factor: torch.Tensor) -> None:
        """Adds the gradients times ``factor`` to those of the parameters.

        Raises:
            BackendError: they were added before.
        """
        if self._held is None:
            raise BackendError(
                "a second backward of a loss whose gradients a pipeline computed in the forward; nearest: call the "
                "model again, or add the losses up and call backward once"
            )
        if self._check is not None:
            self._check(factor)
        held, self._held = self._held, None
        computed = [(one, new) for one, new in zip(self._parameters, held, strict=True) if new is not None]
        _multiply([local_of(gradient) for _, gradient in computed], factor / self._scale)
        for parameter, gradient in computed:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        self._on_added()


def _multiply(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies in place; in fp32 where the factor would be rounded to a gradient's half precision."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    for dtype, equal in by_dtype.items():
        if dtype.itemsize >= min(factor.dtype.itemsize, 4):
            multiply(equal, factor.to(dtype))
            continue
        for gradient in equal:
            gradient.copy_(gradient.to(factor.dtype) * factor)


class _AddHeld(torch.autograd.Function):
    """The identity of the loss, whose backward adds held gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, held: HeldGradients) -> torch.Tensor:
        """Returns the value."""
        ctx.held = held
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[None, None, None]:
        """Adds the gradients times the gradient of the loss."""
        ctx.held.add(factors[0])
        return None, None, None
