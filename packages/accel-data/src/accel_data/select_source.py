"""The source that a DataLoader is read through, and the seed that all ranks use."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from accel_data.options import LoaderOptions
from accel_data.reading import Reading, drawn_seed, own_seed, read_dataloader, seedable
from accel_data.source import Source
from accel_data.stateful_loader import stateful, torchs_class
from accel_data.walks import sized
from accel_data.workers import delivering_in_order
from accel_state.errors import ConfigError, DataError
from accel_state.parallelism import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a loader is prepared: its share, whether batches go to a device, and the group that agrees on the seed."""

    shard: DataShard
    on_device: bool = False
    group: "ProcessGroup | None" = None
    slice_fn: Callable[..., Any] | None = None


def dispatches(dataloader: "DataLoader[Any]", options: LoaderOptions, placement: Placement) -> bool:
    """Whether rank 0 reads for all; never with one rank, where it would only cost time."""
    if placement.shard.count == 1 or options.dispatch_batches is False:
        return False
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if is_stream and _is_sharded(dataloader, options):
        return False
    if options.dispatch_batches is None and not (is_stream and placement.on_device):
        return False
    if options.global_batch_size is not None or options.sharding != "index":
        raise ConfigError(
            "dispatch_batches sends what rank 0 reads as it comes; global_batch_size and sharding need "
            "dispatch_batches=False"
        )
    return True


def _is_sharded(dataloader: "DataLoader[Any]", options: LoaderOptions) -> bool:
    """Whether each rank was given another part of the data, of which rank 0 could only send its own."""
    from accel_data.iterable.capabilities import inspect_stream

    given = inspect_stream(dataloader.dataset).presharded or (
        "already_sharded=True" if options.already_sharded else None
    )
    if given is not None and options.dispatch_batches:
        raise ConfigError(
            f"dispatch_batches=True sends what rank 0 reads, but each rank holds a part of this dataset ({given}): the "
            "others' parts would never be read. Drop dispatch_batches, or give rank 0 the whole dataset"
        )
    return given is not None


def select_source(dataloader: "DataLoader[Any]", options: LoaderOptions, placement: Placement) -> Source:
    """The source that suits the dataset and the options. A collective where ranks share map-style data."""
    dataloader = delivering_in_order(dataloader)
    if dispatches(dataloader, options, placement):
        from accel_data.dispatch_source import DispatchSource

        base = _reading_source(dataloader, options, replace(placement, shard=DataShard()))
        return DispatchSource(base, placement.shard, options, group=placement.group, slice_fn=placement.slice_fn)
    return _reading_source(dataloader, options, placement)


def _reading_source(dataloader: "DataLoader[Any]", options: LoaderOptions, placement: Placement) -> Source:
    if isinstance(dataloader.dataset, IterableDataset):
        from accel_data.iterable.source import StreamSource

        if options.global_batch_size is not None or options.sharding != "index":
            raise ConfigError(
                f"global_batch_size and sharding compute positions, which {type(dataloader.dataset).__name__} does not "
                "have: they need a dataset with __getitem__ and __len__"
            )
        if options.use_stateful_dataloader:
            dataloader = stateful(dataloader)
        return StreamSource(dataloader, placement.shard, options, group=placement.group)
    from accel_data.map_source import MapSource

    reading = read_dataloader(dataloader)
    if options.use_seedable_sampler and torchs_class(reading.sampler) is RandomSampler:
        reading = replace(reading, sampler=seedable(reading.sampler, options.data_seed))
    source = MapSource(dataloader, placement.shard, reading=reading, options=options)
    source.seed = _agreed(_own_seed(reading, options), sized(dataloader.dataset), options, placement)
    return source


def _own_seed(reading: Reading, options: LoaderOptions) -> int | None:
    """This rank's idea of the seed; None: the order is always the same."""
    if type(reading.sampler) is SequentialSampler and not reading.whole:
        return None
    if options.data_seed is not None:
        return options.data_seed
    own = own_seed(reading.sampler)
    return drawn_seed(reading) if own is None else own


def _agreed(seed: int | None, size: int | None, options: LoaderOptions, placement: Placement) -> int | None:
    """Rank 0's seed on every rank; raises ``DataError`` on all of them when their datasets differ in length."""
    shares = placement.shard.count > 1
    if not shares and (seed is None or options.data_seed is not None):
        return seed
    from accel_state.objects import all_gather_object

    said = all_gather_object((seed, size), group=placement.group)
    if shares and len({length for _, length in said}) > 1:
        lengths = ", ".join(f"rank {rank} has {length} samples" for rank, (_, length) in enumerate(said))
        raise DataError(
            f"the ranks were given datasets of different lengths: {lengths}. Every rank is given the whole dataset, "
            "and reads its share of it"
        )
    agreed: int | None = said[0][0]
    return agreed
