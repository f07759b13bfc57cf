"""``load_state_dict`` with full tensors, called by the user on a model that is sharded already."""

from typing import Any

from torch import nn

from accel_backends.ops.dtensor import is_dtensor, placed_like
from accel_backends.ops.fqn import named_parameters
from accel_backends.ops.state_dicts import ONLY_PLACES
from accel_state.errors import BackendError


def take_full_tensors(model: nn.Module) -> None:
    """Makes every module with DTensors load full tensors that are equal on every rank; without communication."""
    for module in model.modules():
        if any(is_dtensor(parameter) for parameter in module._parameters.values() if parameter is not None):
            module.register_load_state_dict_pre_hook(_place)


def refuse_full_tensors(wrapped: nn.Module, inner: nn.Module) -> None:
    """Makes FSDP1's wrapper and its wrapped model refuse parameters that are not DTensors."""
    for module in (wrapped, inner):
        handle = module.register_load_state_dict_pre_hook(_refuse)
        hooks: Any = module._load_state_dict_pre_hooks
        hooks.move_to_end(handle.id, last=False)  # before torch's own hook, which fails


def _place(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if prefix + name in state:
            state[prefix + name] = placed_like(state[prefix + name], parameter)


setattr(_place, ONLY_PLACES, True)


def _refuse(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    if prefix:  # the hook of an outer module has run already
        return
    names = named_parameters(module)
    whole = next((name for name, value in state.items() if name in names and not is_dtensor(value)), None)
    if whole is not None:
        raise BackendError(
            f"load_state_dict of a model prepared with fsdp_version=1 was given the whole {whole}, and every rank "
            "holds pieces; load weights before prepare, or copy them within accelerator.full_parameters(model), or use "
            "fsdp_version=2, which takes full tensors"
        )
