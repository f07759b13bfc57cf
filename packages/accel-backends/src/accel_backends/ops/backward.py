"""Backward of a scaled loss, with explanations for losses that have no gradients."""

from collections.abc import Mapping
from typing import Any, final

import torch

from accel_state.errors import BackendError


@final
class ScaledBackward:
    """Backward of ``scale`` times a loss. Caches the root gradient, which is the same in most steps.

    ``scale`` is passed to torch as the gradient of the loss: the result equals that of ``(scale * loss).backward()``,
    without the multiplication.
    """

    __slots__ = ("_key", "_root", "_version")

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._root: torch.Tensor | None = None
        self._version = 0

    def __call__(self, loss: torch.Tensor, scale: float, kwargs: Mapping[str, Any]) -> None:
        """Computes the gradients; ``kwargs`` go to ``torch.Tensor.backward``.

        Raises:
            BackendError: a loss that is no scalar or has no graph.
        """
        try:
            scaled, arguments = self.scaled(loss, scale, kwargs)
            scaled.backward(**arguments)
        except (RuntimeError, AttributeError) as error:
            explain(loss, kwargs, error)
            raise

    def scaled(
        self, loss: torch.Tensor, scale: float, kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Returns a tensor and the arguments with which its ``backward`` computes the gradients of the scaled loss."""
        if scale == 1.0:
            return loss, kwargs
        if kwargs or loss.dtype.itemsize < 4:
            return (loss.float() if loss.dtype.itemsize < 4 else loss).mul(scale), kwargs
        return loss, {"gradient": self._gradient(loss, scale)}

    def clear(self) -> None:
        """Drops the cached root gradient."""
        self._key = self._root = None

    def _gradient(self, loss: torch.Tensor, scale: float) -> torch.Tensor:
        key = (scale, loss.dtype, loss.device, loss.shape)
        # A hook on the loss receives this very tensor, and may have changed it in place.
        if self._root is None or self._key != key or self._root._version != self._version:
            if loss.numel() != 1:
                raise RuntimeError("not a scalar")  # explained by the caller
            self._key, self._root = key, torch.full_like(loss, scale, requires_grad=False)
            self._version = self._root._version
        return self._root


def explain(loss: object, kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raises the reason why a loss has no gradients; returns if the reason is none of the known ones.

    Raises:
        BackendError: the loss is no tensor, no scalar, or has no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise BackendError(f"backward got a {type(loss).__name__}; expected the loss as a tensor") from error
    if loss.numel() != 1 and "gradient" not in kwargs:
        raise BackendError(
            f"backward got a loss of shape {tuple(loss.shape)}; expected one number: take its mean() or sum(), or "
            "pass gradient="
        ) from error
    if not loss.requires_grad:
        raise BackendError(
            "backward got a loss without a graph: nothing that requires gradients went into it. Was it computed "
            "under no_grad, detached, or are all parameters frozen?"
        ) from error
