"""Refusal of reads of ``parameter.grad`` after an engine has partitioned gradients, when ``grad`` is None."""

import sys
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from accel_state.errors import BackendError

_NAME = "_accel_name"
# Packages and modules that may read: DeepSpeed, accel, torch's functions that clear, move or copy gradients, and the
# Trainer of Transformers, which looks at the types of gradients before it calls clip_grad_norm_.
_PACKAGES = frozenset({"accel", "accel_backends", "deepspeed"})
_TENSOR: str = torch.Tensor.__deepcopy__.__module__
_MODULES = frozenset({_TENSOR, "torch.nn.modules.module", "torch.nn.parameter", "transformers.trainer"})
_GRAD: Any = torch.Tensor.grad


@final
class ReducedGradient(nn.Parameter):
    """A parameter whose gradient is partitioned over ranks; reading ``grad`` raises BackendError if it is None."""

    @property
    def grad(self) -> torch.Tensor | None:
        found: torch.Tensor | None = _GRAD.__get__(self)
        if found is None and self.requires_grad and not _is_let_in(sys._getframe(1).f_globals.get("__name__", "")):
            raise BackendError(
                f"{self.__dict__[_NAME]}.grad was read after backward, and DeepSpeed has spread the gradients over "
                "ranks by then (ZeRO stages 2 and 3 in backward, stage 1 in clip_grad_norm_), so that it is None and "
                "the step takes others; clip with accelerator.clip_grad_norm_ or clip_grad_value_, change gradients "
                "with register_hook, read copies from accelerator.full_gradients(model), or use zero_stage=0"
            )
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)


def _is_let_in(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES or module in _MODULES


@final
class Reads:
    """Refuses reads of the gradients of some parameters while they are hidden.

    Args:
        parameters: by FQN; instances of subclasses of ``nn.Parameter`` are ignored.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = [one for one in parameters.values() if type(one) is nn.Parameter]
        self._kind: type[nn.Parameter] = nn.Parameter
        for name, parameter in parameters.items():
            if type(parameter) is nn.Parameter:
                parameter.__dict__[_NAME] = name

    def hide(self) -> None:
        """Refuses reads from now on."""
        self._become(ReducedGradient)

    def show(self, *_: object) -> None:
        """Allows reads again."""
        self._become(nn.Parameter)

    def remove(self) -> None:
        """Restores the parameters."""
        self.show()
        for parameter in self._parameters:
            parameter.__dict__.pop(_NAME, None)

    def _become(self, kind: type[nn.Parameter]) -> None:
        if kind is not self._kind:
            self._kind = kind
            for parameter in self._parameters:
                parameter.__class__ = kind
