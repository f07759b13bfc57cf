"""One contract: a model and a loop that every backend trains as one process does, or refuses by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from accel_testing.contracts.loops import Train, train
from accel_testing.contracts.samples import Route, SampleBatch, make_samples, one_part

Models = nn.Module | tuple[nn.Module, ...]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A contract of every backend.

    Attributes:
        name: unique name of its subject.
        build: makes the bare model, or several.
        train: the loop, given a driver and the models.
        steps: optimizer steps.
        since: the latest step at which a refusal may be raised: 0 in ``prepare``, 1 in the first step, and so on; None:
            no backend may refuse.
        accumulate: micro-batches of a step.
        by_hand: the loop counts micro-batches itself, without accumulation windows of the Accelerator.
        short: the last window is one micro-batch short.
        copies: all ranks train on the same samples, so that the models' buffers agree too.
        route: the part of a model that processes each sample.
        options: of backends, by the backend's name; if there are any, the case applies to these backends only.
        names: further names that a refusal may mention, beside parameters, modules and classes of the models.
    """

    name: str
    build: Callable[[], Models]
    train: Train = train
    steps: int = 4
    since: int | None = 1
    accumulate: int = 1
    by_hand: bool = False
    short: bool = False
    copies: bool = False
    route: Route = one_part
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def concerns(self, backend: str) -> bool:
        """Whether the case applies to this backend."""
        return not self.options or backend in self.options

    def models(self, dtype: torch.dtype) -> tuple[nn.Module, ...]:
        """The bare models, with the same weights on every rank; the global random state is restored."""
        before = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            torch.set_default_dtype(torch.float64)
            try:
                built = self.build()
            finally:
                torch.set_default_dtype(before)
        return tuple(model.to(dtype) for model in (built if isinstance(built, tuple) else (built,)))

    def samples(self, dtype: torch.dtype) -> SampleBatch:
        """All samples of the run, in order."""
        samples = make_samples(self.steps, self.route, accumulate=self.accumulate, dtype=dtype)
        if not self.short:
            return samples
        from accel_testing.contracts.samples import ROWS
        from accel_testing.equivalence.program import take_samples

        cut: SampleBatch = take_samples(samples, slice(0, len(samples.x) - ROWS // self.accumulate))
        return cut
