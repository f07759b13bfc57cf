"""Learning-rate scheduler wrapper that steps once per optimizer step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.optimizer import PreparedOptimizer
    from accel_observe.meters.lr_preview import LearningRates

SchedulerSteps = Literal["per_step", "per_process"]


class Scheduler(Protocol):
    """Interface of a scheduler: torch's, or any other object with these methods."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@final
class PreparedScheduler:
    """The user's scheduler behind the step clock: one step per optimizer step, none if that was skipped.

    A call between the end of a loop over a prepared loader and the next micro-batch is that of a schedule of epochs,
    and always steps.

    With ``repeats`` above 1 (``scheduler_steps="per_process"``) every step moves the schedule that many times, as
    Accelerate does; a schedule written for the number of optimizer steps needs 1. Pickling and copying apply to the
    inner scheduler.

    Attributes:
        scheduler: the user's scheduler; all other attributes are forwarded to it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        optimizers: "Sequence[PreparedOptimizer]",
        clock: "StepClock",
        *,
        follow_optimizer: bool = True,
        repeats: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = tuple(optimizers)
        self._clock = clock
        self._follow = follow_optimizer
        self._repeats = repeats

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the schedule if an optimizer step was due and taken.

        Always, after the loop over a prepared loader, or if the schedule does not follow the optimizer.
        """
        if not self._follow:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._clock.passed:
            if not self._clock.due:
                if not self._clock.plugin.adjust_scheduler:
                    self.scheduler.step(*args, **kwargs)
                return
            for optimizer in self.optimizers:
                if optimizer.step_was_skipped:
                    return
        if self._repeats == 1:
            self.scheduler.step(*args, **kwargs)
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._repeats):
            if total is not None and self.scheduler.last_epoch >= total:  # type: ignore[attr-defined]
                return
            self.scheduler.step(*args, **kwargs)

    @property
    def unprepared(self) -> Scheduler:
        """The user's scheduler."""
        return self.scheduler

    @property
    def released(self) -> bool:
        """Whether one of its optimizers is released: their Accelerator has been freed."""
        return any(optimizer.released for optimizer in self.optimizers)

    def learning_rates(self, num_steps: int) -> "LearningRates":
        """Preview of the schedule's next ``num_steps`` optimizer steps; the schedule itself does not step."""
        from accel_observe.meters.lr_preview import learning_rates

        return learning_rates(self.scheduler, num_steps, repeats=self._repeats)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self.scheduler.get_last_lr()  # type: ignore[attr-defined, no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # true only before __init__, when copy and pickle probe for attributes
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.scheduler,)


def _identity(scheduler: Scheduler) -> Scheduler:
    return scheduler


AcceleratedScheduler = PreparedScheduler
