"""Shapes of saved tensors, compared with those of a model.

An extra state (``get_extra_state`` of a module) may be of any type, and of another shape each time.

A 4-bit weight of bitsandbytes is a row of bytes. Its shape, the size of its blocks and the kind of numbers are JSON in
a tensor of bytes beside it, ``weight.quant_state.bitsandbytes__nf4``, whose length varies with its numbers.
"""

import json
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_PACKED = ".quant_state.bitsandbytes__"
_EXTRA = "_extra_state"
_COMPARED = ("shape", "blocksize", "quant_type")


def is_packed(name: str) -> bool:
    """Whether a tensor of this name is JSON that describes a 4-bit weight; it has no shape to compare."""
    return _PACKED in name


def is_extra_state(name: str) -> bool:
    """Whether the entry of a state dict of this name is what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == _EXTRA


def shapes_differ(name: str, own: Any, given: Any) -> bool:
    """Whether a value is no tensor of the shape of ``own``; false if ``own`` has no shape yet, or is an extra state.

    Of JSON about a 4-bit weight the shape that it names is compared; without values (on the meta device) it fits.
    """
    if not isinstance(own, torch.Tensor) or is_lazy(own) or is_extra_state(name):
        return False
    if not isinstance(given, torch.Tensor):
        return True
    if is_packed(name):
        return not given.is_meta and _facts(own) != _facts(given)
    return own.shape != given.shape


def shape_text(name: str, value: Any) -> str:
    """The shape of a tensor, or what JSON about a 4-bit weight says, for an error message."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if not is_packed(name):
        return str(tuple(value.shape))
    facts = _facts(value)
    if facts is None:
        return "no description of a 4-bit weight"
    shape, block, kind = facts
    return f"about a weight of shape {shape} in blocks of {block} {kind} numbers"


def _facts(packed: torch.Tensor) -> tuple[Any, ...] | None:
    """What JSON about a 4-bit weight says of it; None if it cannot be read."""
    try:
        found = json.loads(bytes(packed.detach().cpu().flatten().tolist()))
        return tuple(tuple(found[key]) if key == "shape" else found[key] for key in _COMPARED)
    except (ValueError, TypeError, LookupError):
        return None
