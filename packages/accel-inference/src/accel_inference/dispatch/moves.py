"""Methods of an offloaded model in place of those that move or convert it, and of those that save and load it."""

import functools
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

import torch
from torch import nn

from accel_inference.hooks.hook import CASTS, REPLACED
from accel_inference.private import names_device

_LOG = getLogger("accelerate.big_modeling")
"""Under this name users of Accelerate filter the warning."""

_TARGETS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def guard_moves(model: nn.Module) -> None:
    """Gives a model own methods in place of ``REPLACED``.

    Moves and casts warn. If weights are offloaded they are refused, and so is a ``load_state_dict`` that copies: they
    would change the placeholders on the meta device only. ``save_pretrained`` reads offloaded weights.
    """
    others = {"save_pretrained": _save, "load_state_dict": _load}
    for name in REPLACED:
        if hasattr(type(model), name):
            own: Callable[..., Any] = functools.partial(others.get(name, _move), model, name)
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


def _load(model: nn.Module, name: str, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Loads a state dict.

    Raises:
        RuntimeError: values of offloaded weights would be copied into placeholders on the meta device, and lost.
    """
    assign = kwargs.get("assign", args[1] if len(args) > 1 else False)
    state = () if assign else model.state_dict(keep_vars=True).items()
    lost = [key for key, one in state if key in state_dict and isinstance(one, torch.Tensor) and one.is_meta]
    if lost:
        raise RuntimeError(
            f"load_state_dict() does not reach weights that are offloaded: {', '.join(lost[:8])}. Nearest: "
            "assign=True, which keeps the new values in memory; remove_hook_from_submodules(model) first; or "
            "load_checkpoint_and_dispatch"
        )
    return getattr(type(model), name)(model, state_dict, *args, **kwargs)


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
