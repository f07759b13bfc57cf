"""Models that take turns on a device, each from its forward to the next one's."""

from typing import Any

import torch
from torch import nn

from accel_inference.hooks.hook import ModelHook, remove_hook_from_module
from accel_state.device.memory import clear_device_cache
from accel_state.pytree.operations import send_to_device


class CpuOffload(ModelHook):
    """Moves a model to its execution device when it computes, after ``prev_module_hook`` has moved its own away."""

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: "UserCpuOffloadHook | None" = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = torch.device("cpu") if execution_device is None else torch.device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model and its hook, for the user to move the model away or remove the hook."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Moves the model to the CPU."""
        self.model.to("cpu")

    def remove(self) -> None:
        """Removes the hook; the model stays where it is."""
        remove_hook_from_module(self.model)
