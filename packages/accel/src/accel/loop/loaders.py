"""Preparation of loaders, and exact metrics of their batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.setup.run_strategy import RunStrategy
    from accel_data import LoaderOptions, PreparedLoader
    from accel_data.device.sequence_parallel import Part


@final
class SynchronisedStart:
    """Sets random generators to the main process's state when a loader's pass begins; reports passes to the clock."""

    def __init__(self, clock: "StepClock", rng_types: Sequence[str]) -> None:
        self._clock = clock
        self._rng_types = rng_types

    def began(self, loader: Any) -> None:
        """Called when a pass begins on all ranks."""
        from accel_state.rng import synchronize_rng_states

        synchronize_rng_states(self._rng_types)
        self._clock.began(loader)

    def ended(self, loader: Any) -> None:
        """Called when the pass has ended."""
        self._clock.ended(loader)


@final
class Loaders:
    """Prepares loaders for this rank, and gathers what a loop computes of their batches.

    Attributes:
        options: how loaders that are prepared from now on are sharded.
        rng_types: random generators that ranks synchronise when a pass begins.
    """

    def __init__(
        self, strategy: "RunStrategy", clock: "StepClock", options: "LoaderOptions", rng_types: Sequence[object] | None
    ) -> None:
        self._strategy = strategy
        self._clock = clock
        self.options = options
        # "generator" stands for the order of a loader's samples, on which the ranks agree without synchronising a
        # generator.
        self.rng_types = tuple(kind for kind in map(str, rng_types or ()) if kind != "generator")

    def prepare(self, loader: Any, *, on_device: bool, slice_fn: Callable[..., Any] | None) -> "PreparedLoader":
        """Returns a loader of this rank's batches; a prepared one is returned unchanged."""
        from accel_data import prepare_loader

        session = self._strategy.session
        return prepare_loader(
            loader,
            self._strategy.data_shard,
            device=session.device.torch if on_device else None,
            options=self.options,
            observer=SynchronisedStart(self._clock, self.rng_types) if self.rng_types else self._clock,
            session_group=session.group,
            slice_fn=slice_fn,
            part=self._part_of_sequences(),
        )

    def gather_for_metrics(self, data: Any, *, use_gather_object: bool) -> Any:
        """See ``Accelerator.gather_for_metrics``."""
        from accel_data.metrics import gather_for_metrics, join_parts

        strategy = self._strategy
        group = strategy.backend.layout.sequence_group
        if group is not None:
            data = join_parts(data, strategy.parallelism.size("sp"), group)
        loader = self._clock.active_loader
        counts, rows = (None, None) if loader is None else (loader.real_counts, loader.batch_rows)
        shards = self.shards_of_ranks()
        return gather_for_metrics(
            strategy.session, data, counts, rows=rows, shard_of=shards, use_gather_object=use_gather_object
        )

    def shards_of_ranks(self) -> list[int] | None:
        """Data shard of each rank; None if every rank has its own."""
        topology, parallelism = self._strategy.session.topology, self._strategy.parallelism
        if self._strategy.data_shard.count == topology.world_size:
            return None
        places = (replace(topology, rank=rank) for rank in range(topology.world_size))
        return [parallelism.data_shard(place).index for place in places]

    def _part_of_sequences(self) -> "Part | None":
        """Function that takes this rank's shard of each sequence of a batch; None where models take full sequences."""
        parallelism = self._strategy.parallelism
        shared, options = parallelism.size("sp"), parallelism.sp_handler
        if shared == 1 or options is None or self._strategy.backend.layout.sequence_group is None:
            return None
        from accel_data import split_sequences

        index = parallelism.coordinates(self._strategy.session.rank)["sp"]
        length = None if options.sp_seq_length_is_variable else options.sp_seq_length
        return partial(split_sequences, index=index, count=shared, expected=length)
