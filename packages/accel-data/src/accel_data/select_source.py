"""Selection of the source for a DataLoader, and the seed that all ranks use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final
from uuid import uuid4

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from accel_data.map.dataloader_parts import DataLoaderParts, drawn_seed, own_seed, read_dataloader, seedable
from accel_data.map.index_agreement import IndexCheck
from accel_data.map.index_stream import sized
from accel_data.options import LoaderOptions
from accel_data.source import Source
from accel_data.stateful_dataloader import stateful, torchs_class
from accel_data.workers import delivering_in_order
from accel_state.errors import ConfigError, DataError
from accel_state.parallelism.config import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Context of a loader's preparation: data shard, whether batches go to a device, group that agrees on the seed."""

    shard: DataShard
    on_device: bool = False
    group: "ProcessGroup | None" = None
    slice_fn: Callable[..., Any] | None = None


def dispatches(dataloader: "DataLoader[Any]", options: LoaderOptions, placement: Placement) -> bool:
    """Whether rank 0 reads for all ranks; never with one rank, where that would only cost time."""
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
    """Whether each rank has another shard of the data, of which rank 0 could send only its own."""
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
    """Returns the source for the dataset and the options.

    Collective: every rank of the group must call this. That holds if ranks share map-style data.
    """
    dataloader = delivering_in_order(dataloader)
    if dispatches(dataloader, options, placement):
        from accel_data.dispatch.source import DispatchSource

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
    from accel_data.map.source import MapSource

    reading = read_dataloader(dataloader)
    if options.use_seedable_sampler and torchs_class(reading.sampler) is RandomSampler:
        reading = replace(reading, sampler=seedable(reading.sampler, options.data_seed))
    source = MapSource(dataloader, placement.shard, reading=reading, options=options)
    source.seed, said = _agreed(_own_seed(reading, options), sized(dataloader.dataset), options, placement)
    if len(said) > 1:
        walked = type(reading.batch_sampler if reading.whole else reading.sampler).__name__
        source.check = IndexCheck(said[0].name, default_rank(), said[0].rank, walked)
    return source


def _own_seed(reading: DataLoaderParts, options: LoaderOptions) -> int | None:
    """Returns this rank's proposal for the seed; None if the order is always the same."""
    if type(reading.sampler) is SequentialSampler and not reading.whole:
        return None
    if options.data_seed is not None:
        return options.data_seed
    own = own_seed(reading.sampler)
    return drawn_seed(reading) if own is None else own


class _Said(NamedTuple):
    """Data of one rank that several ranks exchange when they prepare a loader."""

    seed: int | None
    length: int | None
    rank: int
    name: str
    """Proposed name of the loader; that of the first rank is used."""


def _agreed(
    seed: int | None, size: int | None, options: LoaderOptions, placement: Placement
) -> tuple[int | None, Sequence[_Said]]:
    """Returns rank 0's seed, and the data of the ranks that share the dataset.

    Raises ``DataError`` on all of them if their datasets differ in length.
    """
    shares = placement.shard.count > 1
    if not shares and (seed is None or options.data_seed is not None):
        return seed, ()
    from accel_state.collectives.objects import all_gather_object

    said = all_gather_object(_Said(seed, size, default_rank(), uuid4().hex), group=placement.group)
    if shares and len({one.length for one in said}) > 1:
        lengths = ", ".join(f"rank {rank} has {one.length} samples" for rank, one in enumerate(said))
        raise DataError(
            f"the ranks were given datasets of different lengths: {lengths}. Every rank is given the whole dataset, "
            "and reads its share of it"
        )
    return said[0].seed, said if shares else ()


def default_rank() -> int:
    """Returns this process's rank in the default group; 0 without one."""
    from accel_state.process_group.group import default_group

    group = default_group()
    return 0 if group is None else group.rank()
