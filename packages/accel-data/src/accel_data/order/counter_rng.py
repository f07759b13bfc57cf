"""Counter-based random numbers: pure functions of a key and a position.

All computation is in wrapping 64-bit integers, so that every machine, torch version and device gives the same numbers:
a sample order saved as (seed, epoch) stays the same forever.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_MULTIPLIER_A, _MULTIPLIER_B = _MIX_A - (1 << 64), _MIX_B - (1 << 64)
_ROUNDS = 6
_TABLE_LIMIT = 1 << 13


def derive_key(seed: int, *parts: int) -> int:
    """Derives a 64-bit key from a seed and numbers for its purpose; different numbers give unrelated keys.

    The finaliser is that of SplitMix64 (Steele, Lea, Flood 2014), applied once per number.
    """
    word = _finalise(seed & _WORD)
    for part in parts:
        word = _finalise(word ^ _finalise((part & _WORD) + _GOLDEN))
    return word


def _finalise(word: int) -> int:
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_A) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_B) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """Returns the int64 with the same bits, because torch computes in int64."""
    return word - (1 << 64) if word >> 63 else word


def random_words(positions: torch.Tensor, key: int) -> torch.Tensor:
    """Returns a random int64 (all 64 bits) per int64 position: SplitMix64's output at that position of its stream."""
    words = positions * _signed(_GOLDEN)
    words += _signed(key)
    words ^= (words >> 30) & ((1 << 34) - 1)
    words *= _MULTIPLIER_A
    words ^= (words >> 27) & ((1 << 37) - 1)
    words *= _MULTIPLIER_B
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words


def random_below(positions: torch.Tensor, key: int, bound: int) -> torch.Tensor:
    """Returns a random int64 in ``range(bound)`` per position; the bias is below ``bound`` / 2**63."""
    return (random_words(positions, key) & ((1 << 63) - 1)) % bound


def random_unit(positions: torch.Tensor, key: int) -> torch.Tensor:
    """Returns a random float64 in [0, 1) with 53 random bits per position."""
    return ((random_words(positions, key) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sorted_permutation(size: int, key: int) -> torch.Tensor:
    """Returns a permutation of ``range(size)`` as an int64 tensor: the positions, sorted by their random words."""
    return torch.argsort(random_words(torch.arange(size, device="cpu"), key), stable=True)


@final
class Bijection:
    """A permutation of ``range(size)`` that is computed at the requested positions and never stored.

    A generalised Feistel network on the digits of ``position`` in a grid of about sqrt(size) x sqrt(size) cells, with
    cycle walking from the few cells past ``size`` back into the range (Black, Rogaway 2002). Fewer than one position in
    sqrt(size) needs cycle walking. The round functions are tables of sqrt(size) random words (1.5 MB at most), or
    hashes if the tables would be larger.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._rows = max(math.isqrt(max(size - 1, 0)) + 1, 1)
        self._columns = -(-size // self._rows)
        self._functions: Sequence[Callable[[torch.Tensor], torch.Tensor]]
        self._reduced: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._rows <= _TABLE_LIMIT:
            self._functions = [table.take for table in self._tables(key)]
            sums = torch.arange(max(self._rows, self._columns) * (_ROUNDS // 2 + 1), device="cpu")
            self._reduced = (sums % self._rows * self._columns, sums % self._columns)
        else:
            keys = [_signed(derive_key(key, number)) for number in range(_ROUNDS)]
            inputs = (self._columns, self._rows) * (_ROUNDS // 2)
            self._functions = [partial(_hashed, key=k, modulus=m) for k, m in zip(keys, inputs, strict=True)]

    def _tables(self, key: int) -> list[torch.Tensor]:
        """Returns the round functions: alternately of columns, added to rows, and of rows, added to columns.

        A sum is reduced only after the last round. Until then it stays below 4 times its modulus, so every table is
        repeated that often.
        """
        words = (random_words(torch.arange(_ROUNDS * self._rows, device="cpu"), key) >> 33) & 0x7FFFFFFF
        drawn = words.view(_ROUNDS, self._rows)
        shapes = ((self._columns, self._rows), (self._rows, self._columns)) * (_ROUNDS // 2)
        return [(drawn[i, :size] % modulus).repeat(_ROUNDS // 2 + 1) for i, (size, modulus) in enumerate(shapes)]

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the images of ``positions`` (int64, each in ``range(size)``), as a tensor of the same shape."""
        images = self._encrypt(positions)
        while images.numel() and int(images.max()) >= self.size:
            outside = images >= self.size
            images[outside] = self._encrypt(images[outside])
        return images

    def _encrypt(self, words: torch.Tensor) -> torch.Tensor:
        column = words % self._columns
        row = words.floor_divide(self._columns)
        for number in range(0, _ROUNDS, 2):
            row += self._functions[number](column)
            column += self._functions[number + 1](row)
        if self._reduced is not None:  # as tables, because the number of operations dominates for few positions
            return self._reduced[0].take(row).add_(self._reduced[1].take(column))
        row %= self._rows
        column %= self._columns
        return row.mul_(self._columns).add_(column)


def _hashed(half: torch.Tensor, *, key: int, modulus: int) -> torch.Tensor:
    """Returns 32 pseudo-random bits of ``half`` modulo ``modulus``; two multiplications mix in every input bit."""
    word = half % modulus
    word += key
    word *= _MULTIPLIER_A
    word ^= word >> 32
    word *= _MULTIPLIER_B
    word >>= 32
    return word
