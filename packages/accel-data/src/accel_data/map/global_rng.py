"""The process's global random generators: of torch (CPU), of ``random``, and of numpy if the process uses it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar, final

import torch

from accel_data.order.iterators import continuing

ItemT = TypeVar("ItemT")
_DRAW_NOTHING: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
"""Iterators over items that exist already, which draw no random numbers."""


class GlobalGenerator(NamedTuple):
    """A global generator of the process, as functions that read, restore and seed its state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    seed: Callable[[int], object]


def global_generators() -> list[GlobalGenerator]:
    """Returns the generators of torch (CPU), of ``random``, and of numpy if the process uses it."""
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
    """Seeds the global generators of torch (CPU), ``random`` and numpy inside the block, and restores them afterwards.

    A sampler that shuffles with them then yields the same indices on every rank and after a resume. A second block
    continues with the states at the end of the first.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: list[Any] | None = None
        self._outside: list[tuple[GlobalGenerator, Any]] = []

    def __enter__(self) -> None:
        self._outside = [(generator, generator.get()) for generator in global_generators()]
        for number, (generator, _) in enumerate(self._outside):
            if self._inside is not None and number < len(self._inside):
                generator.set(self._inside[number])
            else:
                generator.seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._inside = [generator.get() for generator, _ in self._outside]
        for generator, state in self._outside:
            generator.set(state)


@contextmanager
def unchanged_globals() -> Iterator[None]:
    """Restores the global generators after the block."""
    before = [(generator, generator.get()) for generator in global_generators()]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set(state)


def drawn(sampler: Iterable[ItemT], rng: AbstractContextManager[None], *, limit: int) -> Iterator[ItemT]:
    """Yields the items of a user's sampler, each drawn inside ``rng``.

    Up to ``limit`` items are drawn ahead, because entering ``rng`` swaps the states of three generators, which takes
    longer than drawing an item. An error of the sampler is raised after the items before it.
    """
    with rng:
        items = continuing(iter(sampler))
    if type(items) in _DRAW_NOTHING:
        yield from items
        return
    size = 1
    while True:
        made: list[ItemT] = []
        error: Exception | None = None
        with rng:
            try:
                made.extend(islice(items, size))
            except Exception as raised:
                error = raised
        yield from made
        if error is not None:
            raise error
        if len(made) < size:
            return
        size = min(2 * size, limit)


def seed_globals(seed: int) -> None:
    """Seeds every global generator from one 64-bit number."""
    for generator in global_generators():
        generator.seed(seed)
