"""Device maps: checks of their coverage, and their shortest form."""

from collections.abc import Mapping, MutableMapping
from typing import TypeVar
from warnings import warn

import torch
from torch import nn

from accel_inference.module_tensors.access import get_non_persistent_buffers
from accel_inference.module_tensors.ties import device_of

D = TypeVar("D", bound=int | str | torch.device)


def check_device_map(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> None:
    """Checks that the map covers every tensor that a checkpoint has; warns of entries that match no module.

    Other buffers may be left out, as those of rotary embeddings are in maps by hand; they stay where they are.

    Raises:
        ValueError: a parameter or buffer has no device.
    """
    known = {name for name, _ in model.named_modules()} | set(model.state_dict(keep_vars=True))
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if unknown := [key for key in device_map if key not in known]:
        warn(f"The following device_map keys do not match any submodules in the model: {unknown}", stacklevel=2)
    unsaved = get_non_persistent_buffers(model, recurse=True, fqns=True)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name not in unsaved]
    if missing := [name for name in names if device_of(name, device_map) is None]:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: " + ", ".join(missing)
        )


def clean_device_map(device_map: MutableMapping[str, D], module_name: str = "") -> MutableMapping[str, D]:
    """Merges entries of modules below ``module_name`` that are all on one device, in place; returns the map."""
    prefix = f"{module_name}." if module_name else ""
    below = [key for key in device_map if key.startswith(prefix) or key == module_name]
    devices = [device_map[key] for key in below]
    if len(below) > 1 and len(set(devices)) == 1:
        first = devices[0]
        for key in below:
            del device_map[key]
        device_map[module_name] = first
        return device_map
    for child in dict.fromkeys(prefix + key[len(prefix) :].split(".")[0] for key in below if key != module_name):
        if child not in device_map:
            clean_device_map(device_map, child)
    return device_map
