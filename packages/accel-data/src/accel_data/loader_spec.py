"""Specification of a loader: what is read, for which rank, and whether rank 0 reads for all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import IterableDataset

from accel_data.iterable.capabilities import ReadStrategy, StreamCapabilities, inspect_stream, resolve
from accel_data.options import LoaderOptions
from accel_data.source import Source
from accel_data.stateful_dataloader import stateful
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """A user's DataLoader and how it is read, with every decision that needs no other rank.

    Attributes:
        dataloader: the user's loader, which delivers in order, or a copy that records the state of its streams, if
            the options ask for that.
        shard: this rank's shard of the data.
        strategy: how the ranks share an iterable dataset; None: the dataset is map-style.
        dispatched: whether rank 0 reads for all ranks.
        group: ranks that agree on the seed and on the end of an epoch; None: the default group, if one is open.
        slice_fn: slices a dispatched batch; None: by rows.
    """

    dataloader: "DataLoader[Any]"
    shard: DataShard
    options: LoaderOptions
    strategy: ReadStrategy | None
    dispatched: bool = False
    group: "ProcessGroup | None" = None
    slice_fn: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls,
        dataloader: "DataLoader[Any]",
        shard: DataShard,
        options: LoaderOptions,
        *,
        on_device: bool = False,
        group: "ProcessGroup | None" = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> "LoaderSpec":
        """Decides how ``dataloader`` is read; ``on_device``: its batches are moved to a device.

        Raises:
            ConfigError: the options exclude each other for this dataset.
        """
        dataset: Any = dataloader.dataset
        stream = (
            inspect_stream(dataset, in_worker=dataloader.num_workers > 0)
            if isinstance(dataset, IterableDataset)
            else None
        )
        dispatched = shard.count > 1 and _dispatches(stream, options, on_device=on_device)
        strategy = None
        if stream is not None:
            if options.global_batch_size is not None or options.sharding != "index":
                raise ConfigError(
                    f"global_batch_size and sharding compute positions, which {type(dataset).__name__} does not "
                    "have: they need a dataset with __getitem__ and __len__"
                )
            strategy = resolve(
                stream,
                ranks=1 if dispatched else shard.count,
                workers=dataloader.num_workers,
                already_sharded=options.already_sharded,
                exact=options.exact_streams,
            )
            if options.use_stateful_dataloader:
                dataloader = stateful(dataloader)
        return cls(
            dataloader=dataloader,
            shard=shard,
            options=options,
            strategy=strategy,
            dispatched=dispatched,
            group=group,
            slice_fn=slice_fn,
        )

    def of_reader(self) -> "LoaderSpec":
        """Returns the specification of what rank 0 reads, in full, when it reads for all ranks."""
        return replace(self, shard=DataShard(), dispatched=False)


def open_source(spec: LoaderSpec) -> Source:
    """Returns the source of the specified loader; reads nothing.

    Collective: every rank of the group must call this. That holds if ranks share map-style data.

    Raises:
        ConfigError: the samplers do not support the options.
        DataError: the ranks' datasets have different lengths.
    """
    if spec.dispatched:
        from accel_data.dispatch.source import DispatchSource

        return DispatchSource(open_source(spec.of_reader()), spec)
    if spec.strategy is not None:
        from accel_data.iterable.source import StreamSource

        return StreamSource(spec, spec.strategy)
    from accel_data.map.map_spec import MapSpec
    from accel_data.map.shared_seed import agree_on_seed
    from accel_data.map.source import MapSource

    own = MapSpec.of(spec)
    return MapSource(own, agree_on_seed(own))


def _dispatches(stream: StreamCapabilities | None, options: LoaderOptions, *, on_device: bool) -> bool:
    """Whether rank 0 reads for the others, of which there are some: with one rank that would only cost time."""
    if options.dispatch_batches is False or (stream is not None and _is_sharded(stream, options)):
        return False
    if options.dispatch_batches is None and not (stream is not None and on_device):
        return False
    if options.global_batch_size is not None or options.sharding != "index":
        raise ConfigError(
            "dispatch_batches sends what rank 0 reads as it comes; global_batch_size and sharding need "
            "dispatch_batches=False"
        )
    return True


def _is_sharded(stream: StreamCapabilities, options: LoaderOptions) -> bool:
    """Whether each rank has another shard of the data, of which rank 0 could send only its own."""
    given = stream.presharded or ("already_sharded=True" if options.already_sharded else None)
    if given is not None and options.dispatch_batches:
        raise ConfigError(
            f"dispatch_batches=True sends what rank 0 reads, but each rank holds a part of this dataset ({given}): the "
            "others' parts would never be read. Drop dispatch_batches, or give rank 0 the whole dataset"
        )
    return given is not None
