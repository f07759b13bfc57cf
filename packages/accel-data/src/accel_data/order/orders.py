"""Order of samples as a pure function of (seed, epoch, position).

``order(seed, epoch)[i]`` is random access: resuming at position 10**9 costs as much as at 0, and no rank iterates over
the indices of the others. Orders are values; one epoch of an order is an ``Epoch`` over ``Indices``.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol, final, runtime_checkable

import torch

from accel_data.order.counter_rng import Bijection, derive_key, random_below, random_words, sorted_permutation
from accel_state.errors import DataError

TABLE_LIMIT = 1 << 12
"""Up to this size a shuffle is a stored permutation; beyond, sorting one takes longer than computing it by position."""


class Indices(Protocol):
    """One epoch of an order: maps positions to dataset indices."""

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the dataset indices at ``positions`` (int64, any shape, each in range(len(order)))."""


@runtime_checkable
class Order(Protocol):
    """Maps each position of each epoch to a sample."""

    def __len__(self) -> int:
        """Number of positions in one epoch."""

    def __call__(self, seed: int, epoch: int) -> "Epoch":
        """Returns the order of one epoch."""

    def describe(self) -> dict[str, Any]:
        """Returns the facts that must be equal for a saved position to stay valid, as JSON values with a ``kind``."""


@final
class Epoch:
    """One epoch of an order, as a read-only sequence of dataset indices."""

    __slots__ = ("_indices", "_size")

    def __init__(self, size: int, indices: Indices) -> None:
        self._size, self._indices = size, indices

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        if not -self._size <= position < self._size:
            raise IndexError(f"position {position} is not in an epoch of {self._size} samples")
        return int(self._indices.take(torch.tensor([position % self._size], device="cpu")))

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the dataset indices at ``positions`` (int64 in range(len(self))), as int64 of the same shape."""
        return self._indices.take(positions)

    def lists(self, rows: range, *, shift: int, steps: int) -> Iterator[list[int]]:
        """Returns ``steps`` lists of dataset indices: at ``rows``, then at ``rows`` shifted by ``shift``, and so on."""
        if isinstance(self._indices, SameIndices):  # ranges are faster than tensors
            firsts, ends = (range(begin, begin + steps * shift, shift) for begin in (rows.start, rows.stop))
            return map(list, map(range, firsts, ends, repeat(rows.step)))
        positions = torch.arange(rows.start, rows.stop, rows.step, device="cpu")
        if steps == 1:
            return iter([self._indices.take(positions).tolist()])
        return iter(
            self._indices.take(torch.arange(0, steps * shift, shift, device="cpu")[:, None] + positions).tolist()
        )


@final
class SameIndices:
    """Identity: position ``i`` is sample ``i``."""

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the positions themselves."""
        return positions


@final
class TableIndices:
    """Lookup of positions in a stored int64 table."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the entries at ``positions``."""
        return self._table.take(positions)


@final
class Sequential:
    """0, 1, 2, ... in every epoch."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        return Epoch(self._size, SameIndices())

    def describe(self) -> dict[str, Any]:
        """Kind and size."""
        return {"kind": "sequential", "size": self._size}


def permutation(size: int, key: int) -> Indices:
    """Returns a uniformly random permutation of ``range(size)``: a table if small, otherwise computed on access."""
    if size <= TABLE_LIMIT:
        return TableIndices(sorted_permutation(size, key))
    return Bijection(size, key)


@final
class Shuffled:
    """Every sample once, in a different order in each epoch.

    With ``num_samples`` above ``size`` further permutations follow; below, the permutation is truncated.
    """

    def __init__(self, size: int, *, num_samples: int | None = None) -> None:
        self._source = size
        self._size = size if num_samples is None else num_samples
        if self._size and not size:
            raise DataError(f"{self._size} samples cannot be drawn from an empty dataset")

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        rounds = -(-self._size // self._source) if self._source else 0
        if rounds <= 1:
            return Epoch(self._size, permutation(self._source, derive_key(seed, epoch)))
        return Epoch(self._size, _Repeated(self._source, derive_key(seed, epoch)))

    def describe(self) -> dict[str, Any]:
        """Returns kind, number of positions, and number of samples in the dataset."""
        return {"kind": "shuffled", "size": self._size, "source": self._source}


@final
class _Repeated:
    """One permutation after another; the last two used are cached, so that crossing their boundary is cheap."""

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key = size, key
        self._recent: dict[int, Indices] = {}

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        rounds = positions // self._size
        taken = torch.empty_like(positions)
        for number in rounds.unique().tolist():
            chosen = rounds == number
            taken[chosen] = self._round(number).take(positions[chosen] % self._size)
        return taken

    def _round(self, number: int) -> Indices:
        if number not in self._recent:
            while len(self._recent) > 1:
                del self._recent[next(iter(self._recent))]
            # Round 0 equals an order of exactly one round.
            key = self._key if number == 0 else derive_key(self._key, number)
            self._recent[number] = permutation(self._size, key)
        return self._recent[number]


@final
class Replacement:
    """``num_samples`` independent uniform draws from ``range(size)``."""

    def __init__(self, size: int, *, num_samples: int) -> None:
        if num_samples and not size:
            raise DataError(f"{num_samples} samples cannot be drawn from an empty dataset")
        self._source, self._size = size, num_samples

    def __len__(self) -> int:
        return self._size

    def __call__(self, seed: int, epoch: int) -> Epoch:
        return Epoch(self._size, _Draws(self._source, derive_key(seed, epoch)))

    def describe(self) -> dict[str, Any]:
        """Returns kind, number of positions, and number of samples in the dataset."""
        return {"kind": "replacement", "size": self._size, "source": self._source}


@final
class _Draws:
    def __init__(self, bound: int, key: int) -> None:
        self._bound, self._key = bound, key

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        return random_below(positions, self._key, self._bound)


@final
class Subset:
    """Another order over a list of dataset indices: position -> ``indices[order[position]]``."""

    def __init__(self, indices: Sequence[int] | torch.Tensor, order: Order) -> None:
        self._indices = owned(indices, torch.int64)
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __call__(self, seed: int, epoch: int) -> Epoch:
        return Epoch(len(self), _Looked(self._indices, self._order(seed, epoch)))

    def describe(self) -> dict[str, Any]:
        """Returns kind, a checksum of the indices, and the description of the order over them."""
        return {"kind": "subset", "indices": checksum(self._indices), "order": self._order.describe()}


@final
class _Looked:
    def __init__(self, table: torch.Tensor, inner: Epoch) -> None:
        self._table, self._inner = table, inner

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        return self._table[self._inner.take(positions)]


def owned(values: Sequence[float] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy on the CPU, so that an order stays the same if the user changes its tensor or array in place."""
    return torch.as_tensor(values, dtype=dtype, device="cpu").clone()


def checksum(values: torch.Tensor) -> str:
    """Returns 16 hex digits that differ for int64 tensors of different length or values at any position."""
    flat = values.flatten()
    mixed = random_words(flat ^ random_words(torch.arange(len(flat), device="cpu"), 1), 2)
    return f"{derive_key(int(mixed.sum()), len(flat)):016x}"
