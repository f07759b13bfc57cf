"""Methods of an offloaded model in place of those that move or convert it, and of the one that saves it."""

import functools
from collections.abc import Callable
from logging import getLogger
from typing import Any

import torch
from torch import nn

from accel_inference.hooks.hook import CASTS, MOVES, REPLACED
from accel_inference.private import names_device

_LOG = getLogger("accelerate.big_modeling")
"""Under this name users of Accelerate filter the warning."""

_TARGETS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def guard_moves(model: nn.Module) -> None:
    """Gives a model own methods in place of ``REPLACED``.

    Moves and casts warn, or are refused if weights are offloaded, because they would reach the placeholders on the meta
    device only. ``save_pretrained`` reads offloaded weights.
    """
    for name in REPLACED:
        if hasattr(type(model), name):
            own: Callable[..., Any] = functools.partial(_move if name in MOVES else _save, model, name)
            model.__dict__[name] = functools.update_wrapper(own, getattr(model, name))


def _save(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Saves a model of transformers, which looks for offloaded weights if the model has a ``hf_device_map``."""
    unmapped = not hasattr(model, "hf_device_map")
    if unmapped:
        model.__dict__["hf_device_map"] = {"": "cpu"}
    try:
        return getattr(type(model), name)(model, *args, **kwargs)
    finally:
        if unmapped:
            del model.__dict__["hf_device_map"]


def _move(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    to_dtype = name in CASTS or (name == "to" and not names_device(*args, **kwargs))
    if not to_dtype:
        _LOG.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
    offloaded = {parameter.dtype for parameter in model.parameters() if parameter.is_meta}
    if offloaded and offloaded != {_TARGETS.get(name)}:
        raise RuntimeError(
            "You can't move a model that has some modules offloaded to cpu or disk: "
            f"{name}() does not reach their weights. Nearest: remove_hook_from_submodules(model) first, which brings "
            "them back, or load_checkpoint_and_dispatch with another device map or dtype"
        )
    return getattr(type(model), name)(model, *args, **kwargs)
