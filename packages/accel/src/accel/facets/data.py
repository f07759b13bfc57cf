"""Data of an Accelerator: loaders, exact metrics, uneven inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import nn

from accel.loop.accumulator import StepClock

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel.resilience.preemption import Preemption
    from accel_backends import Backend
    from accel_data import LoaderOptions, PreparedLoader
    from accel_data.device.sequence_parallel import Part
    from accel_state import DataShard, ParallelismConfig
    from accel_state.session import Session


@final
class SynchronisedStart:
    """Sets random generators to the main process's state when a loader's pass begins; reports passes to the clock."""

    def __init__(self, clock: StepClock, rng_types: Sequence[str]) -> None:
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


class DataFacet(ABC):
    """Methods about batches, which need the session, the clock and the loader options together."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    data_shard: "DataShard"
    parallelism_config: "ParallelismConfig"
    rng_types: tuple[str, ...]
    dataloader_config: "LoaderOptions"
    _dataloaders: list[Any]
    _joining: bool = False
    _preemption: "Preemption | None"

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers predictions or labels of the current batch, without the samples that were repeated to fill it.

        Tensors (in any nesting) are concatenated along dimension 0; other objects are gathered as objects, and a list
        of them counts as rows. Inside a prepared loader's loop the result, over a full epoch, holds every sample of the
        dataset exactly once, in the order of the samples; outside of a loop all rows are kept. With sequence
        parallelism, the shards (samples, tokens, ...) of a sequence are concatenated first.

        Raises:
            DataError: with sequence parallelism, a leaf is not a tensor (samples, tokens, ...).
        """
        from accel.loop.metrics import gather_for_metrics

        input_data = self._whole_sequences(input_data)
        loader = self.clock.active_loader
        counts = None if loader is None else loader.real_counts
        return gather_for_metrics(
            self.session, input_data, counts, shard_of=self._shards_of_ranks(), use_gather_object=use_gather_object
        )

    def skip_first_batches(self, dataloader: "DataLoader[Any]", num_batches: int = 0) -> "DataLoader[Any]":
        """Returns a loader like ``dataloader`` that begins after ``num_batches`` batches; both share one position."""
        from accel_data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: "DataLoader[Any]", model: nn.Module) -> Any:
        """Returns the loader, prepared if it is not: prepared loaders yield this rank's shard of each sequence."""
        return self.prepare_data_loader(dl)

    @abstractmethod
    def prepare_data_loader(self, data_loader: "DataLoader[Any]") -> Any:
        """Prepares one loader; a prepared loader is returned unchanged."""

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Lets ranks with fewer batches leave the loop early while the others continue (torch's ``Join``).

        ``even_batches`` overrides the setting of every prepared map-style loader inside the block; joining has an
        effect only if batches are not made even.
        """
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._dataloaders:
                    stack.enter_context(loader.override_even_batches(even_batches))
            if not even:
                stack.enter_context(self.backend.gradients.join(list(joinables)))
                self._joining = self.backend.gradients.ranks > 1
                stack.callback(self._stop_joining)
            yield

    def _stop_joining(self) -> None:
        self._joining = False

    def _shards_of_ranks(self) -> list[int] | None:
        """Data shard of each rank; None if every rank has its own."""
        topology = self.session.topology
        if self.data_shard.count == topology.world_size:
            return None
        places = (replace(topology, rank=rank) for rank in range(topology.world_size))
        return [self.parallelism_config.data_shard(place).index for place in places]

    def _part_of_sequences(self) -> "Part | None":
        """Function that takes this rank's shard of each sequence of a batch; None without sequence parallelism."""
        shared, options = self.parallelism_config.size("sp"), self.parallelism_config.sp_handler
        if shared == 1 or options is None:
            return None
        from accel_data import split_sequences

        index = self.parallelism_config.coordinates(self.session.rank)["sp"]
        length = None if options.sp_seq_length_is_variable else options.sp_seq_length
        return partial(split_sequences, index=index, count=shared, expected=length)

    def _whole_sequences(self, data: Any) -> Any:
        """Concatenates the sequence shards of the sequence-parallel group, in rank order."""
        if self.backend.layout.sequence_group is None:
            return data
        from accel.loop.metrics import join_parts

        return join_parts(data, self.parallelism_config.size("sp"), self.backend.layout.sequence_group)

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
            part=self._part_of_sequences(),
        )
        if self._preemption is not None:
            loader.gate = self._preemption.reading
        return loader
