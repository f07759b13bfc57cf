"""Initialisation of modules on the meta device, unit by unit, so that no rank holds the full model."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from accel_state.errors import PrepareError

Initialiser = Callable[[nn.Module], Any]
Made = dict[nn.Parameter, nn.Parameter]


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_initialisers(model: nn.Module, initialise: Initialiser | None) -> None:
    """Refuses a model on the meta device that has modules without an initialiser.

    Raises:
        PrepareError: modules with parameters or buffers of their own and without ``reset_parameters``.
    """
    if initialise is not None:
        return
    kinds = dict.fromkeys(
        type(module).__name__
        for module in model.modules()
        if any(tensor.is_meta for tensor in _own(module)) and not callable(getattr(module, "reset_parameters", None))
    )
    if kinds:
        raise PrepareError(
            f"{type(model).__name__} is on the meta device, and {', '.join(kinds)} has no reset_parameters() to give "
            "its parameters or buffers values; give param_init_fn (one that does nothing, if weights are loaded after "
            "preparing), or build the model with values on rank 0"
        )


def drop_values(model: nn.Module) -> None:
    """Moves a model to the meta device, to free its memory.

    Replaced parameters that are still referenced become empty.
    """
    made: Made = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = _replaced(parameter, torch.device("meta"), made)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    for parameter in made:
        make_empty(parameter)


def make_empty(parameter: nn.Parameter) -> None:
    """Frees a parameter's memory; references to it see a tensor without elements.

    ``new_empty`` would do the same, but not every subclass of tensors has it.
    """
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def materialise(
    modules: Iterable[nn.Module],
    device: torch.device,
    *,
    made: Made,
    initialise: Initialiser | None = None,
    values_follow: bool = False,
) -> None:
    """Allocates the modules' meta tensors on ``device`` as zeros, and initialises them.

    Args:
        made: new parameter by replaced one, so that tied parameters stay tied; extended here.
        initialise: called with each module; None: the module's ``reset_parameters``.
        values_follow: the caller writes the values afterwards, so no initialiser is called.
    """
    fresh = [module for module in modules if any(tensor.is_meta for tensor in _own(module))]
    for module in fresh:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = _replaced(parameter, device, made)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    if values_follow:
        return
    with torch.no_grad():
        for module in fresh:
            if initialise is not None:
                initialise(module)
            else:
                module.reset_parameters()  # type: ignore[operator]


def _replaced(parameter: nn.Parameter, device: torch.device, made: Made) -> nn.Parameter:
    if parameter not in made:
        with torch.no_grad():
            values = torch.zeros_like(parameter, device=device)
        made[parameter] = nn.Parameter(values, parameter.requires_grad)
    return made[parameter]


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
