"""Local SGD of Accelerate's Accelerator."""

from dataclasses import dataclass, field
from typing import Any, Self

from accel.local_sgd import LocalSGD


@dataclass
class _Prepared:
    trained_apart: set[Any] = field(default_factory=set)


@dataclass
class _Run:
    """What accel's local SGD reads of an Accelerator."""

    num_processes: int
    backend: Any
    prepared: _Prepared = field(default_factory=_Prepared)


class CompatLocalSGD:
    """Within the block, ranks train separately, and ``step`` averages their parameters every few steps."""

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        run: Any = _Run(accelerator.num_processes, accelerator.backend)
        self._inner = LocalSGD(run, model, local_sgd_steps, enabled)

    @property
    def enabled(self) -> bool:
        """Whether there is more than one process, and the caller wants local SGD."""
        return self._inner.enabled

    @property
    def num_steps(self) -> int:
        """Optimizer steps since the block began."""
        return self._inner.num_steps

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def step(self) -> None:
        """Counts an optimizer step, and averages the parameters when their number is a multiple of ``local_sgd_steps``."""
        self._inner.step()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
