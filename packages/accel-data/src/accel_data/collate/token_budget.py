"""Batches by token budget: as many samples as fit a number of tokens."""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import final
from zlib import crc32

import torch
from torch.utils.data import Sampler

from accel_data.collate.padding import padded_length
from accel_state.errors import ConfigError, DataError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Capacity of one batch, in positions after padding to the longest sample of the batch."""

    max_tokens: int
    """Upper limit of the number of samples of a batch times its padded length."""
    max_samples: int | None = None
    """Upper limit of the number of samples of a batch (very short samples would make very large batches)."""
    multiple_of: int = 1
    """The collator's ``multiple_of``, so that the budget counts the padded positions that the model computes on."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_samples", "multiple_of"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def fits(self, longest: int) -> int:
        """Returns the number of samples of at most ``longest`` positions that fit one batch."""
        padded = padded_length(max(longest, 1), multiple_of=self.multiple_of)
        count = self.max_tokens // padded
        return count if self.max_samples is None else min(count, self.max_samples)


def pack(lengths: torch.Tensor, order: torch.Tensor, budget: TokenBudget, *, pool: int) -> list[list[int]]:
    """Splits ``order`` (sample indices) into pools, sorts each by length and fills batches from the longest down.

    The first sample of a batch is its longest and determines the number of samples. A larger ``pool`` reduces padding
    and shuffles less. Every index of ``order`` is in exactly one batch.
    """
    batches: list[list[int]] = []
    for members in order.split(pool):
        ranked = members[torch.argsort(lengths[members], descending=True, stable=True)]
        indices, sizes = ranked.tolist(), lengths[ranked].tolist()
        start = 0
        while start < len(indices):
            stop = start + budget.fits(sizes[start])
            batches.append(indices[start:stop])
            start = stop
    return batches


def even_out(batches: list[list[int]], multiple: int) -> list[list[int]]:
    """Makes the number of batches a multiple of ``multiple`` by splitting the largest ones in half where they are.

    Every rank therefore gets equally many batches, and every sample is read once. The first batches are repeated only
    if there are fewer samples than batches are needed.
    """
    missing = -len(batches) % multiple
    # A heap of (-size, position, offset): both halves keep the position of the batch, next to batches of similar
    # length.
    heap = [(-len(batch), position, 0, batch) for position, batch in enumerate(batches)]
    heapq.heapify(heap)
    while missing and heap and heap[0][0] < -1:
        _, position, offset, batch = heapq.heappop(heap)
        middle = (len(batch) + 1) // 2
        heapq.heappush(heap, (-middle, position, offset, batch[:middle]))
        heapq.heappush(heap, (middle - len(batch), position, offset + middle, batch[middle:]))
        missing -= 1
    evened = [batch for _, _, _, batch in sorted(heap, key=lambda entry: entry[1:3])]
    return evened + [evened[i % len(evened)] for i in range(missing)] if evened else []


@final
class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler for samples of different lengths: each batch holds as many samples as fit a token budget.

    Batches are a pure function of (lengths, budget, seed, epoch). Each group of ``groups_of`` consecutive batches has
    similar lengths, and the number of batches is a multiple of ``groups_of``: if that is a multiple of the number of
    data-parallel ranks, all ranks get equally many batches, of about equal cost at each step, and every sample is read
    once.

    For a prepared loader (``DataLoader(..., batch_sampler=sampler)``) keep the default ``num_shards``: the loader
    shards the batches. Without a prepared loader, ``num_shards`` and ``index`` select the batches of each rank.

    Raises ``DataError``, naming the sample, for a sample longer than the budget.
    """

    drop_last = False
    """Attribute that a prepared loader reads from batch samplers; the last batches are never dropped."""

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        budget: int | TokenBudget,
        *,
        shuffle: bool = True,
        seed: int = 0,
        groups_of: int | None = None,
        num_shards: int = 1,
        index: int = 0,
        pool: int = 16384,
    ) -> None:
        """``lengths[i]`` is the number of positions of sample ``i``; ``pool`` the number of samples sorted together."""
        self.budget = budget if isinstance(budget, TokenBudget) else TokenBudget(max_tokens=budget)
        self.shuffle, self.seed, self.pool = shuffle, seed, pool
        self.num_shards, self.index = num_shards, index
        self.groups_of = num_shards if groups_of is None else groups_of
        self.epoch = 0
        if not 0 <= index < num_shards:
            raise ConfigError(f"index is {index}; it must be from 0 to num_shards - 1 = {num_shards - 1}")
        if self.groups_of < 1 or self.groups_of % num_shards:
            raise ConfigError(
                f"groups_of is {self.groups_of}; it must be a multiple of num_shards = {num_shards}, "
                "so that every rank gets equally many batches"
            )
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if len(self._lengths) and self.budget.fits(int(self._lengths.max())) < 1:
            longest = int(self._lengths.argmax())
            raise DataError(
                f"sample {longest} has {int(self._lengths[longest])} tokens, more than max_tokens="
                f"{self.budget.max_tokens} after padding to a multiple of {self.budget.multiple_of}; "
                "raise max_tokens, or cut samples and give their cut lengths"
            )
        self._planned: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the shuffle."""
        self.epoch = epoch

    def plan(self, epoch: int) -> list[list[int]]:
        """Returns all batches of an epoch, of all ranks, in the order in which they are read."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._plan(epoch))
        return self._planned[1]

    @property
    def fingerprint(self) -> str:
        """What determines the batches of an epoch: a position inside one is valid for a sampler with the same only."""
        facts = {
            **asdict(self.budget),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "groups_of": self.groups_of,
            "pool": self.pool,
            "lengths": self._checksum,
        }
        return ", ".join(f"{name}={value}" for name, value in facts.items())

    @cached_property
    def _checksum(self) -> str:
        return f"{crc32(array('q', self._lengths.tolist())):08x}"

    def _plan(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
        count = len(self._lengths)
        order = (
            torch.randperm(count, generator=generator, device="cpu")
            if self.shuffle
            else torch.arange(count, device="cpu")
        )
        batches = even_out(pack(self._lengths, order, self.budget, pool=self.pool), self.groups_of)
        if not self.shuffle:
            return batches
        # Groups are shuffled as units: within a group, ranks keep batches of similar length for the same step.
        groups = torch.randperm(len(batches) // self.groups_of, generator=generator, device="cpu").tolist()
        return [batch for group in groups for batch in batches[group * self.groups_of : (group + 1) * self.groups_of]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.plan(self.epoch)[self.index :: self.num_shards])

    def __len__(self) -> int:
        """Number of batches of this rank in the current epoch; it may differ slightly between epochs."""
        return len(self.plan(self.epoch)) // self.num_shards


def _mix(seed: int, epoch: int) -> int:
    """Hashes two numbers to a 63-bit seed (the finaliser of SplitMix64), so that neighbouring pairs are unrelated."""
    mask = (1 << 64) - 1
    value = (seed * 0x9E3779B97F4A7C15 + epoch + 1) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1
