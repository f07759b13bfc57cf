"""Optimizer wrapper that steps only when the accumulation window ends."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch.optim import Optimizer

from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock

_BACKWARD_AGAIN = (
    "the closure of {optimizer} goes backward again in the last micro-batch of an accumulation window, and the step "
    "needs the gradients of all of its micro-batches, which the closure does not compute; nearest: "
    "gradient_accumulation_steps=1, or without accumulate a closure that goes through all micro-batches"
)


class GroupCheck(Protocol):
    """Interface of a backend's gradients that a prepared optimizer needs."""

    def check_group(self, group: Mapping[str, Any]) -> None: ...
    def clear_unreduced(self, optimizer: Optimizer) -> None: ...


class Stepper(Protocol):
    """Interface of a backend that a prepared optimizer needs."""

    @property
    def gradients(self) -> GroupCheck: ...
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool: ...
    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None: ...


@final
class PreparedOptimizer(Optimizer):
    """The user's optimizer behind the step clock: ``step`` has an effect when a step is due, ``zero_grad`` after it.

    It is a ``torch.optim.Optimizer`` for schedulers and type checks, but its parameter groups, state and defaults are
    the inner optimizer's own objects. Pickling and copying apply to the inner optimizer.

    Attributes:
        optimizer: the user's optimizer, whose parameters are those of the prepared model.
        step_was_skipped: the last due step was skipped on all ranks because gradients had overflowed.
        keeps_zeros: ``zero_grad`` was last called with ``set_to_none=False``.

    Args:
        on_skip: bound method called after a skipped step. Held weakly, so it does not keep its owner alive.
    """

    optimizer: Optimizer
    step_was_skipped: bool
    keeps_zeros: bool

    def __init__(
        self, optimizer: Optimizer, clock: "StepClock", backend: Stepper, on_skip: Callable[[], None] | None = None
    ) -> None:
        # Does not call Optimizer.__init__, which would copy the groups and patch this class's step with profiler hooks.
        self.__dict__.update(optimizer=optimizer, step_was_skipped=False, keeps_zeros=False)
        told = None if on_skip is None else weakref.WeakMethod(on_skip)
        self.__dict__.update(_clock=clock, _backend=backend, _on_skip=told, _stepped_in=None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters if a step is due, and returns the closure's loss (None without a closure).

        In a micro-batch whose step is not due, the closure is called once, because its backward may be in it.

        Raises:
            BackendError: the Accelerator that prepared this optimizer has released it; or the closure goes backward
                again in the last of several micro-batches (LBFGS, SAM), whose step needs the gradients of all of them.
        """
        if not self._clock.due:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._clock.uncleared.discard(self)
            return loss
        if self._backend is None:
            raise BackendError("this optimizer was freed by free_memory(); prepare an optimizer again before stepping")
        losses: list[Any] = []
        if closure is None:
            self._clock.finish()
            stepped = self._backend.step(self.optimizer)
        else:

            def keeping() -> Any:
                losses.append(self._evaluated(closure, again=bool(losses)))
                return losses[-1]

            stepped = self._backend.step(self.optimizer, keeping)
        self.step_was_skipped = not stepped
        self._clock.stepped(self.optimizer)
        self._stepped_in = self._clock.era
        if self._clock.postponed:
            self._clock.postponed.pop(self, None)
        if not stepped and self._on_skip is not None and (tell := self._on_skip()) is not None:
            tell()
        return losses[0] if losses else None

    def _evaluated(self, closure: Callable[[], Any], *, again: bool) -> Any:
        """Calls the closure of a step that is due; ``again``: not for the first time.

        Raises:
            BackendError: the closure goes backward after the last of several micro-batches already has.
        """
        clock = self._clock
        several, before = clock.window.several, clock.unstepped
        error = BackendError(_BACKWARD_AGAIN.format(optimizer=type(self.optimizer).__name__))
        if several and again:
            raise error
        clock.unstepped = False  # until a backward
        try:
            loss = closure()
            if several and before and clock.unstepped:
                raise error
        finally:
            clock.unstepped = clock.unstepped or before
        clock.finish()
        return loss

    @property
    def uncleared(self) -> bool:
        """Whether it has stepped, in this run or the one that was resumed, and not cleared its gradients since."""
        return self._stepped_in is self._clock.era or self in self._clock.uncleared

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients once for each accumulation window: after its step, or in place of it.

        The first call after a step clears the gradients, also if it is the first line of the next window. Further calls
        inside the window keep them. In the last micro-batch a call in place of ``step`` drops the window's gradients;
        followed by the backward of this micro-batch, or by the step, it drops nothing.
        """
        clock = self._clock
        self.keeps_zeros = not set_to_none
        if self._stepped_in is not clock.era and self not in clock.uncleared:
            if not clock.due:
                return
            if clock.window.unreduced:
                clock.postponed[self] = set_to_none
                return
            if clock.window.several and id(self.optimizer) not in clock.window.done:
                clock.window.dropped = type(self.optimizer).__name__
        self.clear(set_to_none)

    def clear(self, set_to_none: bool) -> None:
        """Clears the gradients at once, those that ranks have not reduced yet included."""
        clock = self._clock
        self._stepped_in = None
        clock.uncleared.discard(self)
        clock.cleared(self.optimizer)
        if self._backend is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self._backend.zero_grad(self.optimizer, set_to_none=set_to_none)
            if clock.window.unreduced:
                self._backend.gradients.clear_unreduced(self.optimizer)

    def train(self) -> None:
        """Forwards to optimizers that keep two sets of weights (schedule-free ones); no-op for others."""
        switch = getattr(self.optimizer, "train", None)
        if callable(switch):
            switch()

    def eval(self) -> None:
        """Forwards to optimizers that keep two sets of weights (schedule-free ones); no-op for others."""
        switch = getattr(self.optimizer, "eval", None)
        if callable(switch):
            switch()

    @property
    def unprepared(self) -> Optimizer:
        """The user's optimizer."""
        return self.optimizer

    @property
    def released(self) -> bool:
        """Whether ``release`` was called: its Accelerator has been freed."""
        return self._backend is None

    def release(self) -> None:
        """Releases the backend; stepping afterwards is an error."""
        self.__dict__["_backend"] = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group to the inner optimizer.

        Raises:
            BackendError: its parameters belong to no prepared model, while several ranks train.
        """
        if self._backend is not None:
            if isinstance(given := param_group["params"], Iterator):
                param_group["params"] = list(given)
            self._backend.gradients.check_group(param_group)
        self.optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own list."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's own state mapping."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's own defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # true only before __init__, when copy and pickle probe for attributes
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.optimizer,)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def _identity(optimizer: Optimizer) -> Optimizer:
    return optimizer


AcceleratedOptimizer = PreparedOptimizer
