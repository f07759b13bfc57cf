"""Regional compilation in place, under Accelerate's names."""

from typing import Any

from torch import nn

from accel_backends.ops.blocks import repeated_blocks
from accel_backends.ops.compile import compile_in_place


def compile_regions_in_place(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compiles each repeated block, and each layer outside of them, in place; their classes stay as they are.

    Blocks of one class share code, which torch compiles once. ``compile_kwargs`` are those of ``torch.compile``.
    """
    names = set(repeated_blocks(module))
    for name, layer in module.named_modules():
        inside = any(name.startswith(f"{block}.") for block in names)
        if name in names or (not inside and not any(True for _ in layer.children())):
            compile_in_place(layer, **compile_kwargs)
    return module


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of modules of the class of its first one."""
    members = list(module) if isinstance(module, nn.ModuleList) else []
    return bool(members) and all(isinstance(one, type(members[0])) for one in members)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is such a list, or has one inside."""
    return any(is_repeated_blocks(one) for one in module.modules())
