"""Functions that belong to no other module."""

from torch import nn

from accel.state import wait_for_everyone as wait_for_everyone
from accel_backends.ops.compile import compile_regions as compile_regions
from accel_backends.ops.compile import unwrap as unwrap


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Returns the user's own model inside a prepared or wrapped one, as ``Accelerator.unwrap_model`` does.

    ``recursive`` also replaces wrapped modules inside the user's own by what they wrap.
    """
    own = unwrap(model, keep_torch_compile=keep_torch_compile)
    if recursive:
        from accel_backends.ops.compile import unwrap_children

        unwrap_children(own, keep_torch_compile=keep_torch_compile)
    if keep_fp32_wrapper:
        return own
    from accel_precision import plain_module

    return plain_module(unwrap(own, keep_torch_compile=False))
