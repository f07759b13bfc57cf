"""Placeholders of the optimizer and the scheduler that DeepSpeed's configuration describes."""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch.optim import Optimizer

from accel_state.errors import PrepareError


@final
class DummyOptim(Optimizer):
    """Placeholder of the optimizer of DeepSpeed's configuration; ``prepare`` returns that optimizer in its place.

    Its values replace "auto" at ``optimizer.params.lr`` and ``optimizer.params.weight_decay``.

    Attributes:
        params: as given.
        lr: learning rate.
        weight_decay: weight decay.
        kwargs: further arguments, which are ignored.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        self.params: list[Any] = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(self.params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises PrepareError: only the optimizer that ``prepare`` returns can step."""
        raise PrepareError(
            "DummyOptim stands for the optimizer of a DeepSpeed config, and updates nothing itself: prepare it with "
            "strategy 'deepspeed' and step what prepare returns, or use an optimizer of torch.optim"
        )


@final
class DummyScheduler:
    """Placeholder of the scheduler of DeepSpeed's configuration; ``prepare`` returns that scheduler in its place.

    Its values replace "auto" at ``scheduler.params.total_num_steps``, ``warmup_num_steps``, ``warmup_max_lr`` and
    ``warmup_min_lr``. With ``lr_scheduler_callable`` that function creates the scheduler, and the configuration needs
    none.

    Attributes:
        optimizer: the optimizer that the scheduler drives.
        total_num_steps: optimizer steps of the run.
        warmup_num_steps: optimizer steps of the warmup, in which the learning rate rises.
        lr_scheduler_callable: creates a scheduler for an optimizer.
        kwargs: further arguments, which are ignored.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raises PrepareError: only the scheduler that ``prepare`` returns can step."""
        raise PrepareError(
            "DummyScheduler stands for the scheduler of a DeepSpeed config: prepare it with strategy 'deepspeed' and "
            "step what prepare returns, or use one of torch.optim.lr_scheduler"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict. ``prepare`` recognises schedulers by this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises PrepareError for a state: only the scheduler that ``prepare`` returns has one."""
        if state_dict:
            raise PrepareError(
                f"DummyScheduler stands for the scheduler of a DeepSpeed config and has no state, but got "
                f"{', '.join(map(str, state_dict))}: load it into what prepare returns"
            )
