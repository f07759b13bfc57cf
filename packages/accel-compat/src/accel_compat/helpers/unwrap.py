"""The user's module in a prepared one."""

from typing import Any

from torch import nn

from accel_backends.ops.compile import unwrap, unwrap_children
from accel_compat.private import is_compiled
from accel_precision.autocast import restore_module


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Returns the user's module; without ``keep_fp32_wrapper`` its forward is no longer under autocast.

    ``recursive`` also replaces wrapped modules inside the user's.
    """
    inner = unwrap(model, keep_torch_compile=keep_torch_compile)
    if not isinstance(inner, nn.Module):
        return inner
    if recursive:
        unwrap_children(inner, keep_torch_compile=keep_torch_compile)
    if not keep_fp32_wrapper:
        user = inner.__dict__.get("_modules", {}).get("_orig_mod", inner) if is_compiled(inner) else inner
        restore_module(user)
        _restore_forward(user)
    return inner


def _restore_forward(module: nn.Module) -> None:
    """Removes wrappers of ``forward`` if the module keeps the one before them, as Accelerate's modules do."""
    original = module.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(module).forward:
        module.__dict__.pop("forward", None)
    else:
        module.forward = original
