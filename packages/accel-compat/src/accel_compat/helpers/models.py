"""Compiled and wrapped models."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accel_compat.private import is_compiled


def is_compiled_module(module: Any) -> bool:
    """Whether torch.compile returned this module."""
    return is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether blocks of this module are compiled."""
    return any(one is not module and is_compiled_module(one) for one in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is sharded over a mesh."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_pretty_name(item: Any) -> str:
    """Name of an object, or of its class."""
    if not hasattr(item, "__qualname__") and not hasattr(item, "__name__"):
        item = getattr(item, "__class__", item)
    return str(getattr(item, "__qualname__", getattr(item, "__name__", item)))


def get_module_children_bottom_up(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, children before their parents."""
    ordered: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop(0)
        ordered.append(module)
        pending.extend(module.children())
    return ordered[::-1]


def recursive_getattr(item: Any, attr: str) -> Any:
    """Attribute of an attribute, by a dotted name."""
    for name in attr.split("."):
        item = getattr(item, name)
    return item


def convert_bytes(size: float) -> str:
    """Size in bytes as text with a unit."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def merge_dicts(source: dict[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Copies nested values of ``source`` into ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a process on this host listens on the port."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port of this host on which no process listens."""
    from accel_launch.launch.supervisor.ports import reserved_port

    with reserved_port(0) as port:
        return port


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Device of the first parameter of a module."""
    return next(parameter.parameters()).device


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Iterable[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Size of a module together with those that share its parameters, each parameter counted once.

    Args:
        tied_params: names of parameters that share memory with one of the module.
        module_size: size of the module, in bytes.
        module_sizes: sizes of all modules and parameters by name, in bytes.
        modules_to_treat: modules that have no device yet, by name.

    Returns:
        The size in bytes; names of the modules that own ``tied_params``; these modules.

    Raises:
        ValueError: no module of ``modules_to_treat`` owns one of the parameters.
    """
    waiting = dict(modules_to_treat)
    found: dict[str, nn.Module] = {}
    size = module_size
    for parameter in tied_params:
        owner = next((name for name in waiting if parameter == name or parameter.startswith(f"{name}.")), None)
        if owner is None:
            raise ValueError(f"{parameter} belongs to none of the modules {', '.join(waiting)}")
        size += (0 if owner in found else module_sizes[owner]) - module_sizes[parameter]
        found[owner] = waiting[owner]
    return size, list(found), list(found.values())
