"""Checks of the system and of optional parts."""

import logging
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from torch import nn

from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_state import environment
from accel_state.enums import DistributedType

LOG = logging.getLogger("accelerate.utils.other")
KERNEL = (5, 5, 0)


def test_launch() -> None:
    """Makes the shared state of the process, which raises an error where processes do not find each other."""
    from accel_compat.state.process_state import SharedPartialState

    SharedPartialState()


def check_os_kernel() -> None:
    """Warns about Linux kernels that are known to make training hang."""
    facts = platform.uname()
    if facts.system != "Linux":
        return
    _, version, *_ = re.split(r"(\d+\.\d+\.\d+)", facts.release)
    if tuple(map(int, version.split("."))) < KERNEL:
        text = (
            f"Detected kernel version {version}, which is below the recommended minimum of 5.5.0; this can cause the "
            "process to hang. It is recommended to upgrade the kernel to the minimum version or higher."
        )
        LOG.warning(text)


def is_peft_model(model: Any) -> bool:
    """Whether a model is peft's."""
    from accel.utils.imports import is_peft_available

    if not is_peft_available():
        return False
    from accel_compat.helpers.unwrap import extract_model_from_parallel

    return any(kind.__name__ == "PeftModel" for kind in type(extract_model_from_parallel(model)).__mro__)


def deepspeed_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: refuses calls in a run that does not use DeepSpeed."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = SharedAcceleratorState._shared_state
        if state and state["distributed_type"] != DistributedType.DEEPSPEED:
            raise ValueError(
                "DeepSpeed is not enabled, please make sure that an `Accelerator` is configured for `deepspeed` before "
                "calling this function."
            )
        return function(*args, **kwargs)

    return call


def get_model_tp_size(model: nn.Module) -> int:
    """Degree of tensor parallelism that a model was loaded with."""
    return int(getattr(model, "tp_size", None) or 1)


def has_no_such_layers(model: nn.Module) -> bool:
    """False: layers of quantization libraries are not made by accel."""
    return False


def gathered_parameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Within the block, parameters that ZeRO stage 3 shards are full."""
    state = SharedAcceleratorState._shared_state
    plugin = SharedAcceleratorState().deepspeed_plugin if state else None
    if plugin is None or not plugin.is_zero3_init_enabled():
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return context


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=value`` of a shell; variables with characters that end a line or a command are left out."""
    lines = environment.convert_dict_to_env_variables(current_env)
    kept = {line.partition("=")[0] for line in lines}
    for name in current_env:
        if name not in kept:
            logging.getLogger("accelerate.utils.environment").warning("the variable %s is left out", name)
    return lines
