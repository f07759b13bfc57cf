"""Models on the meta device: shapes and no memory, whatever their size."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel_inference.module_tensors.access import as_parameter
from accel_state.environment import parse_flag

INCLUDE_BUFFERS = ("ACCEL_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Modules that are built inside have their parameters, and with ``include_buffers`` their buffers, on meta.

    ``include_buffers`` defaults to the variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else to False: buffers are often
    computed when a module is built, and no checkpoint has them. With buffers nothing is allocated at all.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Modules that this thread builds inside have their parameters, and with ``include_buffers`` all tensors, there.

    A parameter keeps its class, its attributes and its ``requires_grad``. Other threads build their modules as usual.
    """
    target = torch.device(device)
    if include_buffers is None:
        include_buffers = any(parse_flag(os.environ, name) for name in INCLUDE_BUFFERS)
    if include_buffers:
        with target:
            yield
        return
    thread = threading.get_ident()

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == target or threading.get_ident() != thread:
            return None
        with torch.no_grad():
            return as_parameter(parameter.detach().to(target), like=parameter)

    hook: Any = move  # torch's annotation leaves out the result
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
