"""Upcast of parameters that were built in half precision, which mixed precision keeps and updates in fp32."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import named_parameters
from accel_precision.facts import HALVES
from accel_precision.policy import PrecisionPolicy
from accel_state.logging import get_logger

_log = get_logger(__name__)
_NAMED = 5


def upcasts(policy: PrecisionPolicy) -> bool:
    """Whether a precision keeps trainable half-precision parameters in fp32."""
    return policy.autocast and policy.params is None


def upcast_states(optimizers: Iterable[Optimizer], policy: PrecisionPolicy) -> None:
    """Converts the optimizer states of half-precision parameters to fp32; to be called before ``upcast_parameters``."""
    if not upcasts(policy):
        return
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or parameter.dtype not in HALVES:
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == parameter.dtype:
                    state[key] = value.float()


def upcast_parameters(model: nn.Module, policy: PrecisionPolicy, *, frozen: bool = False) -> None:
    """Converts trainable half-precision parameters to fp32, if the precision is a mixed one.

    Parameters stay the same objects. ``frozen``: also converts frozen parameters. True precisions, and policies that
    set the dtype of parameters, change nothing.
    """
    if not upcasts(policy):
        return
    widened = []
    for name, parameter in named_parameters(model).items():
        if (frozen or parameter.requires_grad) and parameter.dtype in HALVES:
            parameter.data = parameter.data.float()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()
            widened.append(name)
    if widened:
        more = f" and {len(widened) - _NAMED} more" if len(widened) > _NAMED else ""
        _log.info("parameters are kept in fp32: %s%s", ", ".join(widened[:_NAMED]), more)
