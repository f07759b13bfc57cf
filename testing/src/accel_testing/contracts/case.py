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
    """A promise that is kept on every backend.

    Attributes:
        name: what it is about, unique.
        build: makes the bare model, or several.
        train: the loop, given a driver and the models.
        steps: optimizer steps.
        since: the step in which a refusal is due at the latest: 0 in ``prepare``, 1 in the first step, and so on; None:
            no backend may refuse.
        accumulate: micro-batches of a step.
        by_hand: the loop counts micro-batches itself, and the Accelerator knows nothing of windows.
        short: the last window is one micro-batch short.
        copies: all ranks train on the same samples, so that what a model keeps in its buffers is the same, too.
        route: which part of a model each sample goes through.
        options: of backends, by the backend's name; where there are any, the case is for these backends alone.
        names: what a refusal may name beside parameters, modules and classes of the models.
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
        """Whether the case is one for this backend."""
        return not self.options or backend in self.options

    def models(self, dtype: torch.dtype) -> tuple[nn.Module, ...]:
        """The bare models, with the same weights on every rank; the global random state stays as it was."""
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
