"""Local SGD: every rank trains separately for several steps, then all ranks average their parameters."""

from contextlib import AbstractContextManager
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel.accelerator import Accelerator


@final
class LocalSGD:
    """Within the block, gradients of ``model`` are not reduced; instead, parameters are averaged periodically.

    Call ``step`` after each optimizer step; every ``local_sgd_steps``-th call averages the trained parameters over
    all ranks, and so does the end of the block. One all-reduce for each dtype (Stich, "Local SGD Converges Fast and
    Communicates Little", 2019). With one process, or with ``enabled=False``, it does nothing.

    Raises:
        ConfigError: ``local_sgd_steps`` is no integer of at least 1.
        BackendError: the strategy shards the model, so that ranks have no replicas of their own (on entering).
    """

    def __init__(
        self, accelerator: "Accelerator", model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        steps: Any = local_sgd_steps
        if not isinstance(steps, Integral) or steps < 1:
            raise ConfigError(
                f"local_sgd_steps is {local_sgd_steps!r}; expected an integer of at least 1: parameters are averaged "
                "whenever so many steps have been taken"
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._accelerator = accelerator
        self._backend = accelerator.backend
        self._model = model
        self._quiet: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            # all ranks start from the same parameters; raises if the backend cannot average them
            self._backend.gradients.average_parameters(self._model)
            self._quiet = self._backend.no_sync(self._model)
            self._quiet.__enter__()
            self._accelerator.prepared.trained_apart.add(self._model)
        return self

    def step(self) -> None:
        """Counts one optimizer step; averages the parameters if it is the ``local_sgd_steps``-th.

        Collective: every rank of the group must call this.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._backend.gradients.average_parameters(self._model)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._quiet is None:
            return
        self._quiet.__exit__(None, None, None)
        self._quiet = None
        self._accelerator.prepared.trained_apart.discard(self._model)
        if kind is None and self.num_steps % self.local_sgd_steps:
            self._backend.gradients.average_parameters(self._model)
