"""Random generators of one sample, keyed by (seed, epoch, index)."""

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
    """The random numbers of one sample in one epoch, through the generators of three libraries.

    Every call starts from the beginning: two generators of one ``SampleRng`` give the same numbers.

    Attributes:
        key: 64 bits that decide everything.
    """

    key: int

    def torch_generator(self) -> torch.Generator:
        """A generator of torch's on the CPU."""
        generator = torch.Generator()
        generator.manual_seed(self.key)
        return generator

    def numpy_generator(self) -> "numpy.random.Generator":
        """A generator of numpy's (PCG64)."""
        from numpy.random import PCG64, Generator

        return Generator(PCG64(self.key))

    def python_random(self) -> random.Random:
        """A generator of Python's own ``random``."""
        return random.Random(self.key)

    @contextmanager
    def seeded_globals(self) -> Iterator[None]:
        """Inside, the global generators of torch (CPU), ``random`` and numpy are seeded; outside, nothing has happened.

        Transforms that draw from the global generators become functions of the sample with it. It exchanges the states
        of three generators, which takes some 0.1 ms; a generator that is passed on takes less.
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
    """The random generators of sample ``index`` in ``epoch``, for augmentation that no resume and no resize changes.

    The numbers depend on nothing else: not on the rank or worker that reads the sample, on the batch that it is in, or
    on what was drawn before. ``seed`` is the dataset's own; another one, or another ``epoch``, gives unrelated numbers.
    A map-style dataset knows ``index`` from ``__getitem__``, and the epoch from its ``set_epoch``, which a prepared
    loader calls when a pass begins, in the workers as well.
    """
    return SampleRng(derive_key(seed, epoch, index))
