"""AcceleratedOptimizer: steps when gradients are synchronised."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_compat.state.gradient_state import SharedGradientState


def move_to_device(state: Any, device: Any) -> Any:
    """Returns a nested optimizer state on ``device``."""
    if isinstance(state, list | tuple):
        return type(state)(move_to_device(one, device) for one in state)
    if isinstance(state, dict):
        return type(state)({key: move_to_device(value, device) for key, value in state.items()})
    return state.to(device) if isinstance(state, torch.Tensor) else state


class AcceleratedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, whose ``step`` and ``zero_grad`` have an effect only when gradients are synchronised.

    Attributes:
        optimizer: the user's optimizer.
        scaler: loss scale of fp16, or None.
    """

    _is_accelerate_prepared: bool

    def __init__(
        self, optimizer: Any, device_placement: bool = True, scaler: Any = None, *, backend: Any = None
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.accelerator_state = SharedAcceleratorState() if SharedAcceleratorState._shared_state else None
        self.gradient_state = SharedGradientState()
        self.device_placement = device_placement
        self._is_overflow = False
        self._backend = backend
        if device_placement and self.accelerator_state is not None and optimizer.state:
            optimizer.load_state_dict(move_to_device(optimizer.state_dict(), self.accelerator_state.device))

    @property
    def state(self) -> Any:
        """State of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """Parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        """Defaults of the inner optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "__setstate__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients if they are synchronised; within an accumulation window they are kept.

        Raises:
            ValueError: ``set_to_none`` is given, and the inner optimizer has no such argument.
        """
        if not self.gradient_state.sync_gradients:
            return
        if "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)
        elif set_to_none is not None:
            raise ValueError("`set_to_none` for Optimizer.zero_grad` is not supported by this optimizer.")
        else:
            self.optimizer.zero_grad()
        scale = getattr(self._backend, "loss_scale", None)
        if scale is not None:
            scale.forget(self.optimizer)

    def train(self) -> None:
        """Forwards to optimizers that keep two sets of weights."""
        self._forward("train")

    def eval(self) -> None:
        """Forwards to optimizers that keep two sets of weights."""
        self._forward("eval")

    def _forward(self, name: str) -> None:
        inner = self.optimizer
        if not callable(getattr(inner, name, None)):
            inner = getattr(inner, "optimizer", None)
        if callable(getattr(inner, name, None)):
            getattr(inner, name)()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters if gradients are synchronised."""
        if not self.gradient_state.sync_gradients:
            return None
        if self._backend is not None:
            self._is_overflow = not self._backend.step(self.optimizer, closure)
        elif self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer, *(() if closure is None else (closure,)))
            self.scaler.update()
            self._is_overflow = self.scaler.get_scale() < before
        else:
            self.optimizer.step(*(() if closure is None else (closure,)))
        return None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients had overflowed."""
        return self._is_overflow

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_backend", "accelerator_state", "gradient_state")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _backend=None, gradient_state=SharedGradientState())
        self.accelerator_state = SharedAcceleratorState() if SharedAcceleratorState._shared_state else None

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
