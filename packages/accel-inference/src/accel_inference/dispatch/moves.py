"""Methods of an offloaded model in place of those that move or convert it, and of the one that saves it."""

import functools
from collections.abc import Callable
from logging import getLogger
from typing import Any

import torch
from torch import nn

from accel_inference.hooks.hook import CASTS, MOVES
from accel_inference.private import names_device

_LOG = getLogger("accelerate.big_modeling")
"""Under this name users of Accelerate filter the warning."""

_TARGETS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def guard_moves(model: nn.Module) -> None:
    """Makes ``model.to`` and the like warn, or refuse if modules of the model are offloaded; saving reads the weights.

    They would change the placeholders on the meta device, and not the weights.
    """
    for name in MOVES:
        if hasattr(type(model), name):
            method = getattr(model, name)
            guarded: Callable[..., Any] = functools.partial(_move, model, name)
            model.__dict__[name] = functools.update_wrapper(guarded, method)
    if hasattr(type(model), "save_pretrained"):
        named: Any = model
        saving = functools.partial(_save_pretrained, model)
        model.__dict__["save_pretrained"] = functools.update_wrapper(saving, named.save_pretrained)


def _save_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Saves a model of transformers, which reads offloaded weights, a file at a time, if ``hf_device_map`` has them."""
    cls: Any = type(model)
    if hasattr(model, "hf_device_map"):
        return cls.save_pretrained(model, *args, **kwargs)
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    try:
        return cls.save_pretrained(model, *args, **kwargs)
    finally:
        del model.hf_device_map


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
