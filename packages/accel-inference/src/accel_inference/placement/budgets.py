"""Memory budgets of devices for a model's weights."""

from collections.abc import Mapping, Sequence
from logging import getLogger

import torch
from torch import nn

from accel_inference.module_tensors.dtypes import convert_file_size_to_int
from accel_inference.placement.sizes import SpecialDtypes, compute_module_sizes, unsplittable_classes
from accel_state.device.device import Device
from accel_state.enums import CustomDtype

DeviceName = int | str
Budgets = dict[DeviceName, int]
HOST_DEVICES = ("cpu", "disk")
ACCELERATORS = ("cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu")
"""Types of devices that a map numbers."""
# What kernels and the caching allocator take beside the weights if one device must hold everything.
_SHARE_OF_ONE_DEVICE = 0.9
# Blocks do not divide evenly: each device but the last gets so much of a block more than its share.
_MARGIN = 1.25


def get_max_memory(max_memory: Mapping[DeviceName, int | str] | None = None) -> Budgets:
    """Bytes for weights on each device: free memory of every accelerator and of the host, or what is given.

    Keys are numbers of accelerators, "mps", "cpu" and "disk", and come in this order.

    Raises:
        ValueError: a key is no device, or a size cannot be read.
    """
    if max_memory is None:
        return _free_memory()
    wrong = [key for key in max_memory if not isinstance(key, int) and key not in ("mps", *HOST_DEVICES)]
    if wrong:
        raise ValueError(
            f"Device {wrong[0]!r} is not recognized, available devices are integers (for accelerators), 'mps', 'cpu' "
            "and 'disk'"
        )
    numbered = [key for key in max_memory if isinstance(key, int)]
    if missing := [key for key in numbered if not 0 <= key < _count()]:
        getLogger(__name__).warning("max_memory names devices that are not here: %s", missing)
    order: list[DeviceName] = [*sorted(numbered), *(key for key in ("mps", *HOST_DEVICES) if key in max_memory)]
    return {key: convert_file_size_to_int(max_memory[key]) for key in order}


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def _count() -> int:
    return torch.accelerator.device_count() if _accelerator() in ACCELERATORS else 0


def _free_memory() -> Budgets:
    type_ = _accelerator()
    host = Device("cpu").memory().free
    if type_ == "mps":
        return {"mps": Device("mps").memory().free}
    free: Budgets = {index: Device(str(type_), index).memory().free for index in range(_count())}
    return {**free, "cpu": host}


def mean_layer_size(sizes: Mapping[str, int]) -> int:
    """Mean bytes of the modules that hold tensors and no other module; 0 without any."""
    parents = {name.rpartition(".")[0] for name in sizes if name}
    modules = {name for name in sizes if name in parents}
    outer = {name.rpartition(".")[0] for name in modules if name}
    innermost = [sizes[name] for name in modules if name not in outer and name]
    return int(sum(innermost) / max(len(innermost), 1))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceName, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: SpecialDtypes | None = None,
    low_zero: bool = False,
    *,
    activations: int = 0,
) -> Budgets:
    """Budgets with which ``infer_auto_device_map`` uses all accelerators evenly instead of filling them in turn.

    Each accelerator but the last gets an even share and a margin for blocks that cannot be divided; no budget grows.
    ``low_zero`` leaves device 0 as empty as the others permit, for what ``generate`` keeps there. ``activations``:
    bytes that each device keeps free beside its share of the weights.
    """
    by_user = max_memory is not None
    budgets = get_max_memory(max_memory)
    accelerators = [key for key, size in budgets.items() if key not in HOST_DEVICES and size > 0]
    if not accelerators or "mps" in accelerators:
        return budgets
    if len(accelerators) == 1:
        only = accelerators[0]
        return budgets if by_user else {**budgets, only: int(budgets[only] * _SHARE_OF_ONE_DEVICE)}
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    sharing = len(accelerators) - bool(low_zero)
    share = sizes[""] // sharing + int(
        _MARGIN * max(_largest_block(model, sizes, no_split_module_classes), mean_layer_size(sizes))
    )
    for key in accelerators[bool(low_zero) : -1]:
        budgets[key] = min(share + activations, budgets[key])
    if low_zero:
        others = sum(max(0, budgets[key] - activations) for key in accelerators[1:])
        budgets[accelerators[0]] = min(max(0, sizes[""] - others) + activations, budgets[accelerators[0]])
    return budgets


def _largest_block(model: nn.Module, sizes: Mapping[str, int], unsplittable: str | Sequence[str] | None) -> int:
    """Bytes of the largest module of the classes that may not be split; 0 if there is none."""
    classes = unsplittable_classes(unsplittable)
    return max((sizes[name] for name, part in model.named_modules() if type(part).__name__ in classes), default=0)
