"""Stand-ins for the optimizer and the scheduler that DeepSpeed's configuration describes."""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch.optim import Optimizer

from accel_state.errors import PrepareError


@final
class DummyOptim(Optimizer):
    """Says where the optimizer of DeepSpeed's configuration belongs: prepare gives that optimizer in its place.

    It fills what the configuration leaves "auto": ``optimizer.params.lr`` and ``optimizer.params.weight_decay``.

    Attributes:
        params: what was given.
        lr: learning rate.
        weight_decay: weight decay.
        kwargs: whatever else was given; nothing is done with it.
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
        """Refuses: only what prepare returns steps.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            "DummyOptim stands for the optimizer of a DeepSpeed config, and updates nothing itself: prepare it with "
            "strategy 'deepspeed' and step what prepare returns, or use an optimizer of torch.optim"
        )


@final
class DummyScheduler:
    """Says where the scheduler of DeepSpeed's configuration belongs: prepare gives that scheduler in its place.

    It fills what the configuration leaves "auto": ``scheduler.params.total_num_steps``, ``warmup_num_steps``,
    ``warmup_max_lr`` and ``warmup_min_lr``. With ``lr_scheduler_callable`` that function makes the scheduler of the
    optimizer, and the configuration needs none.

    Attributes:
        optimizer: the optimizer that it drives.
        total_num_steps: optimizer steps of the whole run.
        warmup_num_steps: of those, the ones in which the rate rises.
        lr_scheduler_callable: makes a scheduler of an optimizer.
        kwargs: whatever else was given; nothing is done with it.
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
        """Refuses: only what prepare returns steps.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            "DummyScheduler stands for the scheduler of a DeepSpeed config: prepare it with strategy 'deepspeed' and "
            "step what prepare returns, or use one of torch.optim.lr_scheduler"
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it has no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: it has no state."""
