"""Replacement of the parameters of an optimizer."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state.errors import PrepareError

ConvertState = Callable[[nn.Parameter, str, Any], Any]


def rebind(
    optimizer: Optimizer,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    *,
    convert: ConvertState | None = None,
) -> None:
    """Replaces each parameter of ``before`` in the optimizer by the parameter of the same name in ``after``, in place.

    The lists of parameters stay the same objects, because some optimizers keep references to them. The state of a
    replaced parameter moves to its successor; ``convert(new, key, value)`` converts each value (for example a full
    tensor to a shard). Parameters that are in neither mapping are left alone.

    Raises:
        PrepareError: a parameter of ``before`` that the optimizer holds has no successor in ``after``.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    missing = sorted({names[id(p)] for p in _parameters(optimizer) if id(p) in names and names[id(p)] not in after})
    if missing:
        raise PrepareError(
            f"after wrapping, the model no longer has {', '.join(missing)}, which {type(optimizer).__name__} updates; "
            f"it has {', '.join(list(after)[:5])}{', ...' if len(after) > 5 else ''}"
        )
    for group in optimizer.param_groups:
        for position, old in enumerate(group["params"]):
            new = after[names[id(old)]] if id(old) in names else old
            if new is old:
                continue
            group["params"][position] = new
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                if convert is not None:
                    state = {key: convert(new, key, value) for key, value in state.items()}
                optimizer.state[new] = state


def keep_parameters(optimizer: Optimizer, kept: Collection[int]) -> None:
    """Removes all parameters but those with the ids ``kept``, with their states; the lists stay the same objects."""
    for group in optimizer.param_groups:
        stay = [id(parameter) in kept for parameter in group["params"]]
        for parameter, stays in zip(group["params"], stay, strict=True):
            if not stays:
                optimizer.state.pop(parameter, None)
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [one for one, stays in zip(group[key], stay, strict=True) if stays]


def state_to_device(optimizer: Optimizer) -> None:
    """Moves the state of each parameter to the parameter's device, for models that moved after optimizer creation.

    Step counters (tensors without dimensions) stay on their device: fused and capturable optimizers create them on the
    device themselves, other optimizers need them on the host.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != parameter.device and value.dim() > 0:
                state[key] = value.to(parameter.device)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
