"""Autocast and loss scale under Accelerate's names."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_compat.state.accelerator_state import SharedAcceleratorState


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Autocast context of the run's precision; without ``native_amp`` a context without effect."""
    if not native_amp:
        return contextlib.nullcontext()
    state = SharedAcceleratorState()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(state.mixed_precision)
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(device_type=state.device.type, dtype=dtype, **options)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Loss scale of torch for this device."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.amp.GradScaler("cuda" if accelerator is None else accelerator.type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """Loss scale of torch for FSDP2."""
    return torch.amp.GradScaler(**kwargs)
