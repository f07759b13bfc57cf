"""Random generators of single samples, keyed by (seed, epoch, index)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from accel_data.map.global_rng import global_generators
from accel_data.order.counter_rng import derive_key

if TYPE_CHECKING:
    import numpy


@final
@dataclass(frozen=True, slots=True)
class SampleRng:
    """Random numbers of one sample in one epoch, through the generators of three libraries.

    Every call returns a generator at its start: two generators of one ``SampleRng`` give the same numbers.

    Attributes:
        key: 64-bit key that determines all numbers.
    """

    key: int

    def torch_generator(self) -> torch.Generator:
        """Returns a CPU generator of torch."""
        generator = torch.Generator()
        generator.manual_seed(self.key)
        return generator

    def numpy_generator(self) -> "numpy.random.Generator":
        """Returns a generator of numpy (PCG64)."""
        from numpy.random import PCG64, Generator

        return Generator(PCG64(self.key))

    def python_random(self) -> random.Random:
        """Returns a generator of Python's ``random``."""
        return random.Random(self.key)

    @contextmanager
    def seeded_globals(self) -> Iterator[None]:
        """Seeds the global generators of torch (CPU), ``random`` and numpy inside the block, then restores them.

        Makes transforms that draw from the global generators functions of the sample. The block swaps the states of
        three generators, which takes about 0.1 ms; passing a generator to the transform is cheaper.
        """
        generators = [(generator, generator.get()) for generator in global_generators()]
        try:
            for generator, _ in generators:
                generator.seed(self.key)
            yield
        finally:
            for generator, state in generators:
                generator.set(state)


def sample_rng(seed: int, epoch: int, index: int) -> SampleRng:
    """Returns the random generators of sample ``index`` in ``epoch``, for augmentation that no resume changes.

    The numbers depend on nothing else: not on the rank or worker that reads the sample, its batch, or earlier draws.
    ``seed`` is that of the dataset; another seed, or another ``epoch``, gives unrelated numbers. A map-style dataset
    gets ``index`` in ``__getitem__``, and the epoch in its ``set_epoch``, which a prepared loader calls when a pass
    begins, in the workers as well.
    """
    return SampleRng(derive_key(seed, epoch, index))
