"""Tensors that consist of several tensors (quantized weights of torchao) in the state of a model.

A checkpoint has each inner tensor under the name of the tensor and that of the attribute, ``base.weight.qdata``, and
the name of the class under that of the tensor. Other attributes are not saved, and no class is looked up by its name: a
saved state is loaded into a model that has such tensors, because it was quantized in the same way.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_backends.ops.fqn import few
from accel_state.errors import CheckpointMismatchError
from accel_state.pytree.composite import inner_tensors


def with_inner_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with inner tensors, which share their memory, and class names in place of the tensors that have them."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        inner = inner_tensors(value)
        found[name] = f"{type(value).__module__}.{type(value).__qualname__}" if inner else value
        found |= {f"{name}.{attribute}": one for attribute, one in inner.items()}
    return found


def inner_aliases(own: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    """``aliases``, names of tied tensors to those in the state ``own``, with the inner tensors of each."""
    found = dict(aliases)
    for alias, name in aliases.items():
        if isinstance(own.get(name), str):
            found |= {alias + key.removeprefix(name): key for key in own if key.startswith(f"{name}.")}
    return found


def check_inner_tensors(
    part: str, own: Mapping[str, Any], saved: Mapping[str, Any], aliases: Mapping[str, str]
) -> None:
    """Refuses a saved state whose inner tensors are not those of ``own``, both as ``with_inner_tensors`` returns them.

    Raises:
        CheckpointMismatchError: names the tensors.
    """
    given = {aliases.get(key, key): value for key, value in saved.items()}
    kinds = [(name, one, given[name]) for name, one in own.items() if name in given]
    composite = _composite(own)
    either = composite | _composite(given)
    differ = [
        f"{name} is {_kind(there)} there and {_kind(here)} here"
        for name, here, there in kinds
        if name in either and (type(here) is not type(there) or here != there)
    ]
    inner = tuple(f"{name}." for name in composite)
    differ += [
        f"{name} is {there.dtype} there and {here.dtype} here"
        for name, here, there in kinds
        if inner and name.startswith(inner) and here.dtype != there.dtype
    ]
    if differ:
        raise CheckpointMismatchError(
            f"the checkpoint's {part} is that of a model quantized in another way, which a load does not convert: "
            f"{few(differ)}; nearest: quantize the model as it was when it was saved"
        )


@torch.no_grad()
def load_inner_tensors(own: Mapping[str, Any], saved: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Copies saved inner tensors into those of ``own``; returns what is left of ``saved``."""
    composite = _composite(own)
    inner = tuple(f"{name}." for name in composite)
    left: dict[str, Any] = {}
    for key, value in saved.items():
        name = aliases.get(key, key)
        if inner and name.startswith(inner):
            if name in own:
                own[name].copy_(value)
        elif name not in composite:
            left[key] = value
    return left


def _composite(state: Mapping[str, Any]) -> frozenset[str]:
    """Names of the tensors that consist of others; other text (an extra state) has nothing below its name."""
    texts = {name for name, one in state.items() if isinstance(one, str)}
    return frozenset(name for key in (state if texts else ()) for name in _above(key) if name in texts)


def _above(key: str) -> Iterator[str]:
    """The names of which ``key`` may be an inner tensor: ``a.b`` and ``a`` for ``a.b.c``."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else "one tensor"
