"""Seed of a map-style loader, equal on all ranks, and the check of the indices that its samplers yield."""

from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, final
from uuid import uuid4

import torch
from torch.utils.data import DistributedSampler, SequentialSampler

from accel_data.map.dataloader_parts import DataLoaderParts
from accel_data.map.index_agreement import IndexCheck
from accel_data.map.map_spec import MapSpec
from accel_data.map.samplers import OrderSampler, SeedableRandomSampler
from accel_data.map.surroundings import generator_in
from accel_data.options import LoaderOptions
from accel_state.errors import DataError


@final
@dataclass(frozen=True, slots=True)
class SharedSeed:
    """What the ranks of one map-style loader have agreed on.

    Attributes:
        value: determines, with the epoch, every order; None if the order is always the same.
        check: check of the indices of a user's sampler; None if no other rank reads with that sampler.
    """

    value: int | None = None
    check: IndexCheck | None = None


class _Said(NamedTuple):
    """Data of one rank that several ranks exchange when they prepare a loader."""

    seed: int | None
    length: int | None
    rank: int
    name: str
    """Proposed name of the loader; that of the first rank is used."""


def agree_on_seed(spec: MapSpec) -> SharedSeed:
    """Returns rank 0's seed, and the index check of the ranks that share the dataset.

    Collective: every rank of the group must call this, if they share it.

    Raises:
        DataError: on all ranks, if their datasets differ in length.
    """
    parts, loader, rank = spec.parts, spec.loader, _default_rank()
    seed, shares = _proposed(parts, loader.options), loader.shard.count > 1
    if not shares and (seed is None or loader.options.data_seed is not None):
        return SharedSeed(seed)
    from accel_state.collectives.objects import all_gather_object

    said = all_gather_object(_Said(seed, spec.length, rank, uuid4().hex), group=loader.group)
    if shares and len({one.length for one in said}) > 1:
        lengths = ", ".join(f"rank {rank} has {one.length} samples" for rank, one in enumerate(said))
        raise DataError(
            f"the ranks were given datasets of different lengths: {lengths}. Every rank is given the whole dataset, "
            "and reads its share of it"
        )
    first = said[0]
    if not shares or len(said) == 1:
        return SharedSeed(first.seed)
    walked = type(parts.batch_sampler if parts.own_batch_sampler else parts.sampler).__name__
    return SharedSeed(first.seed, IndexCheck(first.name, rank, first.rank, walked))


def _proposed(parts: DataLoaderParts, options: LoaderOptions) -> int | None:
    """Returns this rank's proposal for the seed; None if the order is always the same."""
    if type(parts.sampler) is SequentialSampler and not parts.own_batch_sampler:
        return None
    if options.data_seed is not None:
        return index(options.data_seed)  # of numpy, it is no JSON value
    own = _own_seed(parts.sampler)
    if own is not None:
        return own
    # Drawn from the generator of the user's sampler; without one, from torch's global generator.
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator_in(parts)))


def _own_seed(sampler: Any) -> int | None:
    """Returns the seed that a sampler has as an attribute, or None."""
    if isinstance(sampler, SeedableRandomSampler):
        return index(sampler.initial_seed)
    if isinstance(sampler, OrderSampler | DistributedSampler):
        return index(sampler.seed)
    return None


def _default_rank() -> int:
    """Returns this process's rank in the default group; 0 without one."""
    from accel_state.process_group.group import default_group

    group = default_group()
    return 0 if group is None else group.rank()
