"""Decomposition of a map-style DataLoader into its samplers, and the computable order of a sampler, if it has one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data.map.samplers import OrderSampler, SeedableRandomSampler
from accel_data.order.counter_rng import derive_key
from accel_data.order.orders import Order, Replacement, Sequential, Shuffled, Subset
from accel_data.order.special_orders import SeededPermutation, Weighted
from accel_data.stateful_dataloader import torchs_class
from accel_state.errors import DataError

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
        whole: whether the batch sampler is not torch's own, so that its batches must be iterated.
    """

    slot: str
    batch_sampler: Any
    sampler: Any
    batch_size: int | None
    drop_last: bool
    batched: bool
    whole: bool


def read_dataloader(dataloader: "DataLoader[Any]") -> DataLoaderParts:
    """Decomposes a map-style DataLoader without changing it."""
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
    return DataLoaderParts(slot, batches, inner, size, drop_last, True, torchs_class(batches) is not BatchSampler)


def order_of(sampler: Any) -> Order | None:
    """Returns the order that replaces a sampler of torch or accel; None for other samplers, which must be iterated.

    Only the classes themselves are replaced, because a subclass may do anything.
    """
    make = _ORDERS.get(torchs_class(sampler))
    return None if make is None else make(sampler)


_BASIS = ("weights", "indices", "num_samples", "replacement", "shuffle", "order")


@final
class Basis:
    """Attributes from which a sampler's order was computed, to detect that the user has changed the sampler."""

    def __init__(self, sampler: Any) -> None:
        self._values = [_content(getattr(sampler, name, None)) for name in _BASIS]

    def differs(self, sampler: Any) -> bool:
        """Whether an attribute was assigned, or a tensor changed in place; changes inside lists are not detected."""
        now = [_content(getattr(sampler, name, None)) for name in _BASIS]
        return any(
            version != version_now or not (value is other or (isinstance(value, int) and value == other))
            for (value, version), (other, version_now) in zip(self._values, now, strict=True)
        )


def _content(value: Any) -> tuple[Any, int]:
    counts = isinstance(value, torch.Tensor) and not value.is_inference()
    return value, value._version if counts else 0


def seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    """Returns a sampler with the same source, number and replacement as ``sampler``, but seeded by seed + epoch."""
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
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


_ORDERS: dict[type, Callable[[Any], Order]] = {
    SequentialSampler: lambda sampler: Sequential(len(sampler.data_source)),
    RandomSampler: _random,
    WeightedRandomSampler: _weighted,
    SubsetRandomSampler: lambda sampler: Subset(sampler.indices, Shuffled(len(sampler.indices))),
    SeedableRandomSampler: _seedable,
    DistributedSampler: _distributed,
    OrderSampler: lambda sampler: sampler.order,
}


def own_seed(sampler: Any) -> int | None:
    """Returns the seed that a sampler has as an attribute, or None."""
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.initial_seed
    if isinstance(sampler, OrderSampler | DistributedSampler):
        return sampler.seed
    return None


def drawn_seed(reading: DataLoaderParts) -> int:
    """Draws a seed from the generator of the user's sampler; without one, from torch's global generator."""
    generator = next((found for found in map(_generator_of, chain_of(reading)) if found is not None), None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def chain_of(reading: DataLoaderParts) -> list[Any]:
    """Returns the user's batch sampler, its sampler, and the samplers that they wrap, outermost first."""
    found: list[Any] = []
    candidates: list[Any] = [reading.batch_sampler, reading.sampler]
    while candidates:
        candidate = candidates.pop(0)
        if candidate is None or any(candidate is known for known in found):
            continue
        found.append(candidate)
        candidates += [getattr(candidate, name, None) for name in ("batch_sampler", "sampler")]
    return found


def _generator_of(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


@final
class Surroundings:
    """The user's samplers and dataset that have a ``set_epoch`` or a state.

    Collected once, because the start of a pass must be fast.

    Attributes:
        dataset_listens: whether the dataset has a ``set_epoch``.
    """

    def __init__(self, reading: DataLoaderParts, dataset: object, *, walked: bool) -> None:
        samplers = chain_of(reading)
        self._listeners = [it for it in [*samplers, dataset] if callable(getattr(it, "set_epoch", None))]
        self._epochs: dict[int, int | None] = {n: 0 for n, it in enumerate(self._listeners) if it is not dataset}
        self.dataset_listens = any(it is dataset for it in self._listeners)
        self._walked = samplers if walked else []
        names = ("state_dict", "load_state_dict")
        self._stateful = [it for it in self._walked if all(callable(getattr(it, name, None)) for name in names)]

    def begin(self, epoch: int, seed: int) -> None:
        """Calls ``set_epoch`` on all of them, and seeds the generators of samplers that are iterated."""
        for listener in self._listeners:
            listener.set_epoch(epoch)
        self._epochs = {number: self._epoch_of(number) for number in self._epochs}
        for number, sampler in enumerate(self._walked):
            generator = _generator_of(sampler)
            if generator is not None:
                generator.manual_seed(derive_key(seed, epoch, number))

    def epoch_chosen(self) -> int | None:
        """Returns the epoch that the script set on a sampler since the last call or ``begin``; None if it set none."""
        for number, known in self._epochs.items():
            epoch = self._epoch_of(number)
            if epoch is not None and epoch != known:
                self._epochs[number] = epoch
                return epoch
        return None

    def _epoch_of(self, number: int) -> int | None:
        epoch = getattr(self._listeners[number], "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def states(self) -> list[Any]:
        """Returns the states of the stateful samplers, outermost first."""
        return [sampler.state_dict() for sampler in self._stateful]

    def load(self, states: Sequence[Any]) -> None:
        """Restores the states of the stateful samplers."""
        for sampler, state in zip(self._stateful, states, strict=False):
            sampler.load_state_dict(state)


def fingerprint_of(dataset: Any) -> str | None:
    """Returns the dataset's ``fingerprint`` (attribute or method), a string that identifies its content, or None."""
    value = getattr(dataset, "fingerprint", None)
    if callable(value):
        value = value()
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{type(dataset).__name__}.fingerprint gives {type(value).__name__}; it must give a string, or None"
        )
    return value
