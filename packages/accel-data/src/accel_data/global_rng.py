"""The global random generators of a process: torch's (CPU), ``random``'s, and numpy's where the process uses it."""

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch


class GlobalGenerator(NamedTuple):
    """One of the process's global generators: how its state is read, restored, and made from a seed."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    seed: Callable[[int], object]


def global_generators() -> list[GlobalGenerator]:
    """Those of torch (CPU), of ``random``, and of numpy if the process uses it."""
    import random
    import sys

    found = [
        GlobalGenerator(torch.random.get_rng_state, torch.random.set_rng_state, torch.default_generator.manual_seed),
        GlobalGenerator(random.getstate, random.setstate, random.seed),
    ]
    if "numpy" in sys.modules:
        from numpy import random as numpy_random

        seed = numpy_random.seed
        found.append(
            GlobalGenerator(numpy_random.get_state, numpy_random.set_state, lambda value: seed(value % (1 << 32)))
        )
    return found


@final
class SeededGlobals(AbstractContextManager[None]):
    """Inside, the global generators of torch (CPU), ``random`` and numpy are seeded; outside, nothing has happened.

    A sampler that shuffles with them then gives the same indices on every rank and again on resuming. Entered again,
    they go on where they were left: torch's, and those of the others that were drawn from the first time, because
    exchanging the states of all three costs more than a batch of indices.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: list[tuple[GlobalGenerator, Any]] | None = None
        self._outside: list[tuple[GlobalGenerator, Any]] = []

    def __enter__(self) -> None:
        if self._inside is not None:
            self._outside = [(generator, generator.get()) for generator, _ in self._inside]
            for generator, state in self._inside:
                generator.set(state)
            return
        self._outside = [(generator, generator.get()) for generator in global_generators()]
        for generator, _ in self._outside:
            generator.seed(self._seed)

    def __exit__(self, *error: object) -> None:
        states = [(generator, generator.get()) for generator, _ in self._outside]
        if self._inside is None:
            torchs, *others = states
            self._inside = [torchs, *(drawn for drawn in others if self._was_drawn_from(*drawn))]
        else:
            self._inside = states
        for generator, state in self._outside:
            generator.set(state)

    def _was_drawn_from(self, generator: GlobalGenerator, state: Any) -> bool:
        generator.seed(self._seed)
        return pickle.dumps(generator.get()) != pickle.dumps(state)


def seed_globals(seed: int) -> None:
    """Seeds every global generator from one 64-bit number."""
    for generator in global_generators():
        generator.seed(seed)
