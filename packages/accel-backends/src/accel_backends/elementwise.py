"""Optimizers that look beyond single elements, with which ranks that hold a part of each parameter cannot step."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

#: torch's optimizers that, on the parts that a backend leaves every rank, fail or step elsewhere than on whole
#: parameters. ``fsdp`` has shards that know of the whole, ``fsdp1`` and ``deepspeed`` pieces of flat tensors.
BEYOND_ELEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fsdp": ("Adafactor", "Rprop"),
        "fsdp1": ("Adafactor", "LBFGS", "Muon"),
        "deepspeed": ("Adafactor", "LBFGS", "Muon"),
    }
)
_TORCHS = "torch.optim"
# Of a trial: shape of its parameters, elements of the first piece, and steps.
_SHAPE, _CUT, _STEPS = (4, 6), 9, 2


def beyond_elements(optimizer: Optimizer, backend: str) -> str | None:
    """The name of torch's optimizer that this one is, or is made of, if parts of that backend are not enough for it."""
    torchs = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith(_TORCHS)}
    return next((name for name in BEYOND_ELEMENTS[backend] if name in torchs), None)


def steps_by_element(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates two pieces of a flat tensor as it updates the whole matrix: tried on a small one.

    torch's own are known. Of others one is made of the same class and options for each of the two; True where that
    cannot be done, or where an optimizer does not do the same twice.
    """
    if type(optimizer).__module__.startswith(_TORCHS):
        return beyond_elements(optimizer, "deepspeed") is None
    options = {key: value for key, value in optimizer.param_groups[0].items() if key in optimizer.defaults}
    generator = torch.Generator().manual_seed(0)
    value, *gradients = (torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS + 1))
    with torch.random.fork_rng([]):
        whole = _tried(type(optimizer), options, [value], [[one] for one in gradients])
        again = _tried(type(optimizer), options, [value], [[one] for one in gradients])
        if whole is None or again is None or not torch.equal(whole, again):
            return True
        pieces = _tried(type(optimizer), options, _pieces(value), [_pieces(one) for one in gradients])
    return pieces is not None and torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6)


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.reshape(-1)
    return [flat[:_CUT], flat[_CUT:]]


def _tried(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    values: Iterable[torch.Tensor],
    gradients: Iterable[Sequence[torch.Tensor]],
) -> torch.Tensor | None:
    """What parameters are after these gradients, flattened into one; None if such an optimizer does not take them."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    try:
        optimizer = kind(parameters, **options)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    except Exception:
        return None
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
