"""AcceleratedScheduler: moves once per process when its optimizers step."""

import warnings
from typing import Any

from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_compat.state.gradient_state import SharedGradientState

warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")


class AcceleratedScheduler:
    """The user's scheduler, which moves when its optimizers step: once per process, or once with ``split_batches``.

    Attributes:
        scheduler: the user's scheduler.
        optimizers: the optimizers that it follows.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = SharedGradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Moves the schedule if the optimizers have stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        if self.split_batches:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(SharedAcceleratorState().num_processes):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        """State of the inner scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """Learning rates that the inner scheduler computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Prints the learning rates of the inner scheduler."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
