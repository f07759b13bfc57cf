"""Guards on the methods that move a model whose modules have devices of their own."""

import functools
from collections.abc import Callable
from logging import getLogger
from typing import Any

from torch import nn

from accel_inference.hooks.hook import MOVES
from accel_inference.private import names_device

_LOG = getLogger("accelerate.big_modeling")
"""Under this name users of Accelerate filter the warning."""


def guard_moves(model: nn.Module) -> None:
    """Makes ``model.to`` and the like warn, or refuse if modules of the model are offloaded."""
    for name in MOVES:
        if hasattr(type(model), name):
            method = getattr(model, name)
            guarded: Callable[..., Any] = functools.partial(_move, model, name)
            model.__dict__[name] = functools.update_wrapper(guarded, method)


def _move(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    to_dtype = name == "to" and not names_device(*args, **kwargs)
    if not to_dtype:
        _LOG.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")
    return getattr(type(model), name)(model, *args, **kwargs)
