"""Decomposition of a map-style DataLoader into its samplers, and the computable order of a sampler, if it has one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data.map.samplers import OrderSampler, SeedableRandomSampler
from accel_data.options import LoaderOptions
from accel_data.order.orders import Order, Replacement, Sequential, Shuffled, Subset
from accel_data.order.special_orders import NodeBlocks, SeededPermutation, Weighted
from accel_data.private import fixed_num_samples
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@final
@dataclass(frozen=True, slots=True)
class DataLoaderParts:
    """Parts of a map-style DataLoader.

    Attributes:
        slot: attribute of the loader that accel's sampler replaces: "batch_sampler", or "sampler" if the loader does
            not batch (``batch_size=None``).
        batch_sampler: the user's batch sampler, or None.
        sampler: the user's sampler of single indices, or None for a batch sampler without one.
        batch_size: size of one batch; None: batches have any size.
        batched: whether the dataset gets lists of indices (otherwise one index at a time).
        own_batch_sampler: whether the batch sampler is not of torch's class, so that its batches must be iterated.
    """

    slot: str
    batch_sampler: Any
    sampler: Any
    batch_size: int | None
    drop_last: bool
    batched: bool
    own_batch_sampler: bool


def read_dataloader(dataloader: "DataLoader[Any]", options: LoaderOptions) -> DataLoaderParts:
    """Decomposes a map-style DataLoader without changing it; ``options`` may ask for a seedable ``RandomSampler``."""
    parts = _decomposed(dataloader)
    if options.use_seedable_sampler and _torchs_class(parts.sampler) is RandomSampler:
        return replace(parts, sampler=_made_seedable(parts.sampler, options.data_seed))
    return parts


def _decomposed(dataloader: "DataLoader[Any]") -> DataLoaderParts:
    batches: Any = dataloader.batch_sampler
    slot = "batch_sampler"
    if batches is None:
        slot = "sampler"
        if not isinstance(dataloader.sampler, BatchSampler):
            return DataLoaderParts(slot, None, dataloader.sampler, 1, False, False, False)
        batches = dataloader.sampler
    size, drop_last = getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False))
    inner = getattr(batches, "sampler", None)
    size = size if isinstance(size, int) else None
    return DataLoaderParts(slot, batches, inner, size, drop_last, True, _torchs_class(batches) is not BatchSampler)


_OF_TORCHDATA = {
    "RandomSampler": RandomSampler,
    "BatchSampler": BatchSampler,
    "StatefulDistributedSampler": DistributedSampler,
}


def _torchs_class(sampler: object) -> type:
    """Returns the class of a sampler; for a sampler of torchdata's, the equivalent class of torch."""
    kind = type(sampler)
    same = _OF_TORCHDATA.get(kind.__name__) if kind.__module__ == "torchdata.stateful_dataloader.sampler" else None
    return kind if same is None else same


def order_of(parts: DataLoaderParts, options: LoaderOptions) -> Order | None:
    """Returns the order that replaces samplers of torch or accel; None for other samplers, which must be iterated.

    Only the classes themselves are replaced, because a subclass may do anything.

    Raises:
        ConfigError: ``sharding="node"`` with an order that does not read each sample once.
    """
    make = None if parts.own_batch_sampler else _ORDERS.get(_torchs_class(parts.sampler))
    order = None if make is None else make(parts.sampler)
    if order is None or options.sharding != "node":
        return order
    kind = order.describe()
    if kind["kind"] not in ("sequential", "shuffled") or kind.get("source", len(order)) != len(order):
        raise ConfigError(f"sharding='node' reads each sample once; it cannot follow the order {kind['kind']!r}")
    return NodeBlocks(len(order), num_nodes=options.num_nodes, shuffle=kind["kind"] == "shuffled")


def _made_seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    """Returns a sampler with the same source, number and replacement as ``sampler``, but seeded by seed + epoch."""
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=fixed_num_samples(sampler),
        generator=sampler.generator,
        data_seed=data_seed,
    )


def _random(sampler: RandomSampler) -> Order:
    if sampler.replacement:
        return Replacement(len(sampler.data_source), num_samples=sampler.num_samples)
    return Shuffled(len(sampler.data_source), num_samples=sampler.num_samples)


def _weighted(sampler: WeightedRandomSampler) -> Order:
    return Weighted(sampler.weights, num_samples=sampler.num_samples, replacement=sampler.replacement)


def _seedable(sampler: SeedableRandomSampler) -> Order:
    if sampler.replacement:
        return Replacement(len(sampler.data_source), num_samples=sampler.num_samples)
    return SeededPermutation(len(sampler.data_source), num_samples=sampler.num_samples)


def _distributed(sampler: Any) -> Order:
    # It shards by its own number of ranks; sharding that shard again would lose all other shards.
    size = len(sampler.dataset)
    return Shuffled(size) if sampler.shuffle else Sequential(size)


def _subset(sampler: SubsetRandomSampler) -> Order | None:
    try:
        return Subset(sampler.indices, Shuffled(len(sampler.indices)))
    except (TypeError, ValueError):  # keys that are no numbers, of a dataset that takes others
        return None


_ORDERS: dict[type, Callable[[Any], Order | None]] = {
    SequentialSampler: lambda sampler: Sequential(len(sampler.data_source)),
    RandomSampler: _random,
    WeightedRandomSampler: _weighted,
    SubsetRandomSampler: _subset,
    SeedableRandomSampler: _seedable,
    DistributedSampler: _distributed,
    OrderSampler: lambda sampler: sampler.order,
}
