"""Pass over map-style data: iteration of the user's DataLoader over the batches of an index stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from accel_data.map.index_agreement import IndexTrail
from accel_data.map.index_batches import IndexBatches
from accel_data.map.skip import iterated, let_go
from accel_data.order.cursor import Step
from accel_data.order.iterators import continuing
from accel_data.source import Pass
from accel_data.stateful_dataloader import is_torchs_iteration
from accel_state.errors import DataError


@final
@dataclass(frozen=True, slots=True)
class MapPlan:
    """What a pass over map-style data needs.

    Attributes:
        dataloader: iterates over ``indices``, which is its sampler.
        indices: the rank's index batches, whose index stream is set.
        generator: draws the workers' seeds.
        initial_seed: see ``Pass.initial_seed``.
        trail: see ``Pass.trail``.
        closed: called when the pass is over.
    """

    dataloader: DataLoader[Any]
    indices: IndexBatches
    generator: torch.Generator
    initial_seed: int | None = None
    trail: IndexTrail | None = None
    closed: Callable[[], None] | None = None


@final
class MapPass(Pass):
    """One iteration of the user's DataLoader over the batches of an index stream.

    Attributes:
        is_over: whether the pass has ended or was left.
    """

    is_over = False

    def __init__(self, plan: MapPlan) -> None:
        dataloader, indices = plan.dataloader, plan.indices
        assert indices.index_stream is not None
        self.trail, self.initial_seed = plan.trail, plan.initial_seed
        self._index_stream, self._indices, self._dataloader = indices.index_stream, indices, dataloader
        self._closed = plan.closed
        # A subclass may yield more or fewer batches than its sampler.
        own = is_torchs_iteration(dataloader)
        self.exact = self._index_stream.exact and own
        self.reads_in_step = own and not dataloader.num_workers
        indices.looks_ahead = self.reads_in_step and not self.exact
        indices.is_read = False
        self._reading = iterated(dataloader, plan.generator)
        self.batches = self._reading if own or indices.num_processes == 1 else self._sharded()

    def _sharded(self) -> Iterator[Any]:
        """Yields the batches of a user's iteration; raises DataError if the first one is not of this rank's shard."""
        batches = continuing(self._reading)
        for first in islice(batches, 1):
            if not self._indices.is_read:
                raise DataError(
                    f"{type(self._dataloader).__name__}.__iter__ gave a batch and has not asked the sampler of the "
                    "prepared loader for its indices: it keeps batches, or an iterator, from before it was prepared, "
                    "and every rank would read all data. Nearest: torch's DataLoader with persistent_workers=True, "
                    "whose workers live on as well"
                )
            yield first
        yield from batches

    @property
    def readers(self) -> Iterator[Any]:
        return self._reading

    @property
    def is_last(self) -> bool:
        """Whether the batch taken last is the last, by its number or because no index batch follows."""
        return self.delivered + 1 == self.length if self.exact else self._indices.exhausted

    @property
    def length(self) -> int | None:  # type: ignore[override]
        """Length of the index stream, if known."""
        return self._index_stream.length

    @property
    def remainder(self) -> int:  # type: ignore[override]
        """Remainder of the index stream, if known."""
        return self._index_stream.remainder

    def close(self) -> None:
        """Ends the workers, unless they are persistent."""
        super().close()
        self._reading = self.batches
        let_go(self._dataloader)
        self.is_over = True
        if self._closed is not None:
            self._closed()
            self._closed = None

    def step(self, number: int) -> Step:
        """Returns the facts of a step, which the index stream computes or has recorded."""
        return self._index_stream.step(number)
