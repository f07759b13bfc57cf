"""Bytes of a model's modules, as they will be after loading."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.access import named_module_tensors, uses_children_uncalled
from accel_inference.module_tensors.dtypes import planned_byte_size, tensor_bytes
from accel_state.enums import CustomDtype

SpecialDtypes = Mapping[str, str | torch.dtype]
Part = tuple[str, nn.Module | Tensor]
"""A module, parameter or buffer under its full name."""


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: SpecialDtypes | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every module, parameter and buffer by full name; "" is the model.

    A tied parameter counts once, under its first name. ``dtype`` is what floating-point tensors will be loaded as if
    that is smaller than their own; ``special_dtypes`` gives the dtypes of single tensors. Names that are not in the
    model have no bytes (the result is a ``defaultdict``).
    """
    special = special_dtypes or {}
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = tensor_bytes(tensor.numel(), planned_byte_size(tensor.dtype, dtype, special.get(name)))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: SpecialDtypes | None = None,
) -> int:
    """Bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def direct_parts(name: str, module: nn.Module | Tensor, *, buffers: bool = True) -> list[Part]:
    """What a module consists of: its own parameters, its children, its own buffers; nothing for a tensor."""
    if isinstance(module, Tensor):
        return []
    own = [
        *module.named_parameters(recurse=False),
        *module.named_children(),
        *(module.named_buffers(recurse=False) if buffers else ()),
    ]
    return [(f"{name}.{part}" if name else part, value) for part, value in own]


def is_divisible(module: nn.Module | Tensor, unsplittable: Sequence[str]) -> bool:
    """Whether a module has children, calls them for their weights, and its class may be split over devices."""
    if isinstance(module, Tensor) or type(module).__name__ in unsplittable or uses_children_uncalled(module):
        return False
    return any(True for _ in module.children())


def layers(parts: Iterable[Part], unsplittable: Sequence[str]) -> Iterator[Part]:
    """The parts and what they consist of, down to what cannot be divided."""
    for name, module in parts:
        if is_divisible(module, unsplittable):
            yield from layers(direct_parts(name, module, buffers=False), unsplittable)
        else:
            yield name, module


def get_max_layer_size(
    modules: Sequence[Part], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Bytes and names of the largest layers among ``modules``; a layer is what cannot be divided."""
    largest, names = 0, list[str]()
    for name, _ in layers(modules, no_split_module_classes):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of a model, and bytes and names of its largest layers."""
    sizes = compute_module_sizes(model)
    unsplittable = unsplittable_classes(getattr(model, "_no_split_modules", None))
    return sizes[""], get_max_layer_size(direct_parts("", model, buffers=False), sizes, unsplittable)


def unsplittable_classes(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names of classes that may not be split, given as one name or several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(sorted(given))
