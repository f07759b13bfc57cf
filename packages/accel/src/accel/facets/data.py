"""An Accelerator's side towards the data: loaders, exact metrics, uneven ends."""

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from torch import nn

from accel.clock import StepClock

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel.preemption import Preemption
    from accel_backends import Backend
    from accel_data import LoaderOptions, PreparedLoader
    from accel_state import DataShard, ParallelismConfig
    from accel_state.session import Session


@final
class SynchronisedStart:
    """Sets random generators to the main process's state whenever a pass of a loader begins, then tells the clock."""

    def __init__(self, clock: StepClock, rng_types: Sequence[str]) -> None:
        self._clock = clock
        self._rng_types = rng_types

    def began(self, loader: Any) -> None:
        """A pass begins on all ranks."""
        from accel_state.rng import synchronize_rng_states

        synchronize_rng_states(self._rng_types)
        self._clock.began(loader)

    def ended(self, loader: Any) -> None:
        """The pass is over."""
        self._clock.ended(loader)


class DataFacet(ABC):
    """Everything about batches that needs the session, the clock and the loader options together."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    data_shard: "DataShard"
    parallelism_config: "ParallelismConfig"
    rng_types: tuple[str, ...]
    dataloader_config: "LoaderOptions"
    _dataloaders: list[Any]
    _preemption: "Preemption | None"

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers predictions or labels of the batch just computed, without the samples repeated to fill it.

        Tensors (in any nesting) are concatenated along dimension 0; other objects are sent as objects and a list of
        them counts as rows. Inside a prepared loader's loop the result, over a whole epoch, holds every sample of the
        dataset exactly once, in the order of the samples; outside of a loop everything is kept.
        """
        from accel.metrics import gather_for_metrics

        loader = self.clock.active_loader
        counts = None if loader is None else loader.real_counts
        return gather_for_metrics(
            self.session, input_data, counts, shard_of=self._shards_of_ranks(), use_gather_object=use_gather_object
        )

    def skip_first_batches(self, dataloader: "DataLoader[Any]", num_batches: int = 0) -> "DataLoader[Any]":
        """A loader like ``dataloader`` whose next pass starts after ``num_batches`` batches, without reading those."""
        from accel_data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Lets ranks with fewer batches than others leave the loop early without the others hanging.

        ``even_batches`` overrides the setting of every prepared map-style loader inside the block; joining happens
        only where batches are not made even.
        """
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._dataloaders:
                    stack.enter_context(loader.override_even_batches(even_batches))
            if not even:
                stack.enter_context(self.backend.join(list(joinables)))
            yield

    def _shards_of_ranks(self) -> list[int] | None:
        """The data shard of each rank; None where each has its own."""
        topology = self.session.topology
        if self.data_shard.count == topology.world_size:
            return None
        places = (replace(topology, rank=rank) for rank in range(topology.world_size))
        return [self.parallelism_config.data_shard(place).index for place in places]

    def _prepare_loader(
        self,
        dataloader: "DataLoader[Any]",
        *,
        on_device: bool,
        slice_fn: Callable[..., Any] | None = None,
    ) -> "PreparedLoader":
        from accel_data import prepare_loader

        loader = prepare_loader(
            dataloader,
            self.data_shard,
            device=self.session.device.torch if on_device else None,
            options=self.dataloader_config,
            observer=SynchronisedStart(self.clock, self.rng_types) if self.rng_types else self.clock,
            session_group=self.session.group,
            slice_fn=slice_fn,
        )
        if self._preemption is not None:
            loader.gate = self._preemption.reading
        return loader
