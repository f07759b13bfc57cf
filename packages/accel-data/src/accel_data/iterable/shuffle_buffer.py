"""A shuffle buffer whose order is a function of positions, so that it is rebuilt after a resume and never saved.

The usual buffer exchanges a random slot for each new element, and so keeps some elements for very long: to rebuild it
means to read back without limit, or to save elements. Here each element leaves within a window of where it was read.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, TypeVar, final

import torch
from torch.utils.data import IterableDataset

from accel_data.iterable.capabilities import choose_epoch, inspect_stream
from accel_data.iterable.worker import Snapshot, open_stream
from accel_data.order.counter_rng import derive_key, random_unit
from accel_state.errors import ConfigError, DataStateError

T = TypeVar("T")

SIZE_KEY, SEED_KEY, EPOCH_KEY = "size", "seed", "epoch"
SOURCE_KEY, SOURCE_AT_KEY, LAST_KEY = "source", "source_at", "last"
_STATES_PER_WINDOW = 16
"""How often the state of the source is noted while one window of it is read."""
_DRAWN = 256


@final
class ShuffleBuffer(IterableDataset[T]):
    """An iterable dataset in shuffled order, with at most ``size`` elements of it in memory.

    Element *i* of ``dataset`` gets the key *i* + *u* x window, where *u* in [0, 1) is random by (seed, epoch, *i*) and
    the window about ``size``; elements come in the order of their keys. (The first window of elements get their keys
    from 0 on, so that the beginning is as well shuffled as the rest.) The order therefore depends on nothing that has
    to be saved. ``state_dict`` holds a state of the source at most ``size`` elements back, and which element came last:
    a resume seeks there, reads at most ``size`` elements again, and continues exactly. A source without
    ``state_dict`` and ``load_state_dict`` is read again from its start.

    It shards as the source does (``shard``, ``num_shards``), and each shard has an order of its own. Prepared loaders
    choose the epoch; in a loop of your own call ``set_epoch``, because every epoch has the same order otherwise.
    Wrap it around elements that are cheap to hold (file names, undecoded samples), and decode in what it is wrapped in
    or in ``collate_fn``.

    Raises:
        ConfigError: ``size`` is less than 1, or ``dataset`` is not iterable.
    """

    def __init__(self, dataset: Iterable[T], size: int, seed: int = 0) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"size is {size!r}; it must be an integer of at least 1")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}; it must be an integer")
        if not isinstance(dataset, Iterable):
            raise ConfigError(
                f"a {type(dataset).__name__} has no __iter__; a shuffle buffer needs an iterable dataset. A DataLoader "
                "shuffles one with __getitem__ and __len__ by shuffle=True"
            )
        self.dataset, self.size, self.seed, self.epoch = dataset, size, seed, 0
        self._loaded: Mapping[str, Any] | None = None
        self._pass: _ShuffledPass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, of the source too. A loaded position is kept if it is in this epoch."""
        if self._loaded is not None and self._loaded[EPOCH_KEY] != epoch:
            self._loaded = None
        self.epoch = epoch
        choose_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[T]:
        if not hasattr(self.dataset, "set_epoch"):  # otherwise the user may have called it
            choose_epoch(self.dataset, self.epoch)
        self._leave_pass()
        begun = self._pass = _ShuffledPass(_PassPlan(self.dataset, self.size, self.seed, self.epoch, self._loaded))
        self._loaded = None
        return iter(begun)

    def _leave_pass(self) -> None:
        if self._pass is not None:
            self._pass.is_latest, self._pass = False, None

    def __len__(self) -> int:
        """Elements of the source; raises ``TypeError`` when it has no length."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def num_shards(self) -> int:
        """Into how many shards the source can be cut; ``AttributeError`` where it does not say."""
        shards = inspect_stream(self.dataset).num_shards
        if shards is None:
            raise AttributeError(f"a {type(self.dataset).__name__} has no num_shards")
        return shards

    @property
    def already_sharded(self) -> bool:
        """Whether the source yields the elements of this rank only."""
        return inspect_stream(self.dataset).presharded is not None

    @property
    def shard(self) -> "Callable[[int, int], ShuffleBuffer[T]]":
        """``shard(num_shards, index)``: a buffer over a shard of the source; ``AttributeError`` where it has none."""
        if not inspect_stream(self.dataset).shardable:
            raise AttributeError(f"a {type(self.dataset).__name__} has no shard(num_shards, index)")
        return self._shard

    def _shard(self, num_shards: int, index: int) -> "ShuffleBuffer[T]":
        source: Any = self.dataset
        part = source.shard(num_shards=num_shards, index=index)
        other: ShuffleBuffer[T] = ShuffleBuffer(part, self.size, derive_key(self.seed, num_shards, index))
        other.set_epoch(self.epoch)
        return other

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator that was made last; JSON values if the states of the source are."""
        if self._loaded is not None:
            return dict(self._loaded)
        source_at, source, last = (0, None, None) if self._pass is None else self._pass.position()
        return {
            SIZE_KEY: self.size,
            SEED_KEY: self.seed,
            EPOCH_KEY: self.epoch if self._pass is None else self._pass.epoch,
            SOURCE_AT_KEY: source_at,
            SOURCE_KEY: source,
            LAST_KEY: last,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next iterator continue behind a saved position.

        Raises:
            DataStateError: it was saved with another ``size`` or ``seed``, whose order is another, or is incomplete.
        """
        keys = (SIZE_KEY, SEED_KEY, EPOCH_KEY, SOURCE_AT_KEY, SOURCE_KEY, LAST_KEY)
        missing = [key for key in keys if key not in state_dict]
        if missing:
            raise DataStateError(f"the state of a shuffle buffer has no {', '.join(missing)}")
        saved, here = (state_dict[SIZE_KEY], state_dict[SEED_KEY]), (self.size, self.seed)
        if saved != here:
            raise DataStateError(
                f"the state is of a shuffle buffer with size {saved[0]} and seed {saved[1]}; this one has size "
                f"{here[0]} and seed {here[1]}, and so another order: give it those of the saved run, or begin a new "
                "epoch"
            )
        self.set_epoch(state_dict[EPOCH_KEY])
        self._leave_pass()
        self._loaded = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": None}


@final
@dataclass(frozen=True, slots=True)
class _PassPlan:
    """What one iteration of a buffer needs; ``loaded``: a saved position to continue from."""

    dataset: Any
    size: int
    seed: int
    epoch: int
    loaded: Mapping[str, Any] | None


@final
class _ShuffledPass:
    """One iteration of a buffer: the elements of the source by (key, index), and what is needed to begin inside.

    Attributes:
        is_latest: set by the buffer: whether no other iteration has begun since, whose state that of the source is.
    """

    def __init__(self, plan: _PassPlan) -> None:
        self.epoch, self.is_latest, loaded = plan.epoch, True, plan.loaded
        self._dataset, self._ended = plan.dataset, False
        # A resume reads again the window, and what lies between it and the state that was noted before it: ``size``.
        self._gap = max(plan.size // _STATES_PER_WINDOW, 1)
        self._window = plan.size - self._gap + 1
        self._key, self._drawn, self._block = derive_key(plan.seed, self.epoch), list[float](), -1
        self._read, self._last = 0, None if loaded is None else loaded[LAST_KEY]
        noted = Snapshot(0, None) if loaded is None else Snapshot(loaded[SOURCE_AT_KEY], loaded[SOURCE_KEY])
        self._states = deque([noted])

    def position(self) -> tuple[int, Any, int | None]:
        """A state of the source with its position, and the index of the element that came last (None: none has)."""
        return (0, None, None) if self._ended else (*self._states[0], self._last)

    def __iter__(self) -> Iterator[Any]:
        noted = self._states[0]
        elements, stateful = open_stream(self._dataset, noted if noted.at else None)
        if stateful is None and noted.at:  # the source seeks no more, or never did
            noted = self._states[0] = Snapshot(0, None)
        begun = self._read = noted.at
        done = (-1.0, -1) if self._last is None else (self._key_of(self._last), self._last)
        held: list[tuple[float, int, Any]] = []
        while True:
            index = self._read
            # The state of a dataset follows its latest iterator, which is another inside a pass over the same buffer.
            follows = stateful is not None and self.is_latest
            if follows and index > begun and index % self._gap == 0:
                self._states.append(Snapshot(index, copy.deepcopy(stateful.state_dict())))
            element = next(elements, self)
            if element is self:
                break
            self._read += 1
            key = self._key_of(index)
            if (key, index) > done:
                heappush(held, (key, index, element))
            # What is still unread has keys from here on, and lies less than a window behind what is held.
            bound = self._read if self._read >= self._window else 0
            while len(self._states) > 1 and self._states[1].at <= self._read - self._window:
                self._states.popleft()
            while held and held[0][0] < bound:
                yield self._next(held)
        while held:
            yield self._next(held)
        self._ended = True

    def _next(self, held: list[tuple[float, int, Any]]) -> Any:
        _, self._last, element = heappop(held)
        return element

    def _key_of(self, index: int) -> float:
        block, place = divmod(index, _DRAWN)
        if block != self._block:
            positions = torch.arange(block * _DRAWN, (block + 1) * _DRAWN, device="cpu")
            self._block, self._drawn = block, random_unit(positions, self._key).tolist()
        first = index if index >= self._window else 0
        return first + self._drawn[place] * (index + self._window - first)
