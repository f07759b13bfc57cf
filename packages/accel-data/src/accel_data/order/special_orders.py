"""Special orders: by weights, by lengths, by nodes, and the order of ``SeedableRandomSampler``."""

from collections.abc import Sequence
from typing import Any, final

import torch

from accel_data.order.counter_rng import derive_key, random_unit, sorted_permutation
from accel_data.order.orders import Epoch, Indices, SameIndices, TableIndices, checksum, owned, permutation
from accel_state.errors import DataError


@final
class SeededPermutation:
    """``torch.randperm`` from a generator seeded with seed + epoch, as ``SeedableRandomSampler`` yields it.

    Holds one permutation in memory.
    """

    def __init__(self, size: int, *, num_samples: int | None = None) -> None:
        self._source = size
        self._size = size if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        generator = torch.Generator().manual_seed(_torch_seed(seed + epoch))
        rounds = -(-self._size // self._source) if self._source else 0
        drawn = [torch.randperm(self._source, generator=generator, device="cpu") for _ in range(rounds)]
        table = torch.cat(drawn)[: self._size] if drawn else torch.empty(0, dtype=torch.int64, device="cpu")
        return Epoch(self._size, TableIndices(table))

    def describe(self) -> dict[str, Any]:
        """Returns kind, number of positions, and number of samples in the dataset."""
        return {"kind": "seeded_permutation", "size": self._size, "source": self._source}


def _torch_seed(seed: int) -> int:
    """Wraps the seed into the range that torch's generators accept."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


@final
class Weighted:
    """``num_samples`` draws, each sample with a probability proportional to its weight.

    With replacement a draw is a lookup in the cumulative weights (float64, one per sample). Without replacement an
    epoch is a table: the samples sorted by exponential arrival times at rates ``weights`` (Efraimidis, Spirakis 2006).

    Raises:
        DataError: a weight is negative or not finite, or too few weights are positive.
    """

    def __init__(self, weights: Sequence[float] | torch.Tensor, *, num_samples: int, replacement: bool = True) -> None:
        self._weights = owned(weights, torch.float64)
        self._size, self._replacement = num_samples, replacement
        if not bool((torch.isfinite(self._weights) & (self._weights >= 0)).all()):
            raise DataError("weights must be finite and at least 0")
        positive = int((self._weights > 0).sum())
        if num_samples > (0 if not positive else num_samples if replacement else positive):
            raise DataError(f"{num_samples} samples cannot be drawn from {positive} with positive weight")

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        key = derive_key(seed, epoch)
        if self._replacement:
            return Epoch(self._size, _WeightedDraws(self._weights, key))
        unit = random_unit(torch.arange(len(self._weights), device="cpu"), key)
        arrivals = torch.where(self._weights > 0, -torch.log1p(-unit) / self._weights, torch.inf)
        return Epoch(self._size, TableIndices(torch.argsort(arrivals, stable=True)[: self._size]))

    def describe(self) -> dict[str, Any]:
        """Returns kind, number of positions, number of samples in the dataset, and a checksum of the weights."""
        return {
            "kind": "weighted" if self._replacement else "weighted_once",
            "size": self._size,
            "source": len(self._weights),
            "weights": checksum(self._weights.view(torch.int64)),
        }


@final
class _WeightedDraws:
    def __init__(self, weights: torch.Tensor, key: int) -> None:
        self._key = key
        self._cumulated = torch.cumsum(weights, 0)
        self._largest = int(weights.nonzero().max()) if len(weights) and bool(weights.any()) else 0

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        targets = random_unit(positions, self._key) * self._cumulated[-1]
        # side="right", so that a sample of weight zero is never drawn; the clamp handles rounding at the upper end.
        return torch.searchsorted(self._cumulated, targets, right=True).clamp_(max=self._largest)


@final
class LengthGrouped:
    """Shuffled such that neighbours have similar lengths, which reduces padding.

    The shuffled samples are split into pools of ``pool`` groups; each pool is sorted by length and split into groups of
    ``group_size`` (a batch, or a global batch), and its groups are shuffled. A larger ``pool`` reduces padding further
    and shuffles less.
    """

    def __init__(self, lengths: Sequence[int] | torch.Tensor, *, group_size: int, pool: int = 50) -> None:
        if group_size < 1 or pool < 1:
            raise DataError(f"group_size is {group_size} and pool is {pool}; both must be at least 1")
        self._lengths = owned(lengths, torch.int64)
        self._group, self._pool = group_size, pool

    def __len__(self) -> int:
        return len(self._lengths)

    def __call__(self, seed: int, epoch: int) -> Epoch:
        size = len(self._lengths)
        key = derive_key(seed, epoch)
        return Epoch(size, _Pools(self._lengths, permutation(size, key), (self._group, self._pool), key))

    def describe(self) -> dict[str, Any]:
        """Returns kind, size, group and pool size, and a checksum of the lengths."""
        return {
            "kind": "length_grouped",
            "size": len(self._lengths),
            "group_size": self._group,
            "pool": self._pool,
            "lengths": checksum(self._lengths),
        }


@final
class _Pools:
    """Sorts a pool on first access, and caches the last one."""

    def __init__(self, lengths: torch.Tensor, base: Indices, grouping: tuple[int, int], key: int) -> None:
        self._lengths, self._base, self._key = lengths, base, key
        self._group, self._span = grouping[0], grouping[0] * grouping[1]
        self._number, self._members = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        pools = positions // self._span
        taken = torch.empty_like(positions)
        for number in pools.unique().tolist():
            chosen = pools == number
            taken[chosen] = self._sorted(number)[positions[chosen] - number * self._span]
        return taken

    def _sorted(self, number: int) -> torch.Tensor:
        if number != self._number:
            start = number * self._span
            members = self._base.take(torch.arange(start, min(start + self._span, len(self._lengths)), device="cpu"))
            members = members[torch.argsort(self._lengths[members], descending=True, stable=True)]
            full = len(members) // self._group
            mixed = sorted_permutation(full, derive_key(self._key, number, 1))
            groups = members[: full * self._group].view(full, self._group)[mixed].flatten()
            # An incomplete group stays last; otherwise all later groups would straddle two lengths.
            self._number, self._members = number, torch.cat([groups, members[full * self._group :]])
        return self._members


@final
class NodeBlocks:
    """One contiguous range of the dataset per node; positions cycle over the nodes.

    Position ``p`` is sample ``p // num_nodes`` of node ``p % num_nodes``; the lengths of the nodes' ranges differ by at
    most one. A position therefore still counts the samples delivered by all nodes, while each node reads only its own
    range.
    """

    def __init__(self, size: int, *, num_nodes: int, shuffle: bool = True) -> None:
        self._size, self._nodes, self._shuffle = size, num_nodes, shuffle

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        key = derive_key(seed, epoch)
        lengths = [self._size // self._nodes + (node < self._size % self._nodes) for node in range(self._nodes)]
        inner = [
            permutation(n, derive_key(key, node)) if self._shuffle else SameIndices() for node, n in enumerate(lengths)
        ]
        return Epoch(self._size, _Blocks(lengths, inner))

    def describe(self) -> dict[str, Any]:
        """Returns kind, size and number of nodes; a position inside an epoch is valid for the same ranges only."""
        return {
            "kind": "node_blocks",
            "size": self._size,
            "num_nodes": self._nodes,
            "shuffle": self._shuffle,
        }


@final
class _Blocks:
    def __init__(self, lengths: list[int], inner: Sequence[Indices]) -> None:
        self._offsets = [sum(lengths[:node]) for node in range(len(lengths))]
        self._inner = inner

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        count = len(self._inner)
        nodes = positions % count
        taken = torch.empty_like(positions)
        for node in nodes.unique().tolist():
            chosen = nodes == node
            taken[chosen] = self._inner[node].take(positions[chosen] // count) + self._offsets[node]
        return taken
