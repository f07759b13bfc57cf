"""Map-style data: the user's DataLoader is kept, with accel's sampler instead of its own."""

import dataclasses
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from accel_data.map.dataloader_parts import order_of
from accel_data.map.dataset_changes import (
    BEGUN_KEY,
    FINGERPRINT_KEY,
    LENGTH_KEY,
    ORDER_KEY,
    DatasetFacts,
    adapted,
    check_dataset,
    order_begun,
)
from accel_data.map.epoch import MapPass, MapPlan
from accel_data.map.global_rng import SeededGlobals
from accel_data.map.index_agreement import IndexTrail
from accel_data.map.index_batches import IndexBatches, WorkerSeeds
from accel_data.map.index_stream import IndexStream, ItemStream, OrderStream, sized
from accel_data.map.map_spec import MapSpec
from accel_data.map.sampler_stream import (
    BatchSamplerStream,
    DrawnRows,
    FunctionStream,
    last_batch_size,
    rounds_in,
    rounds_of,
    skip_batches,
)
from accel_data.map.sharding import UNKNOWN_TOTAL, ByIndex, ByNode, Elastic, Sharding, batches_of
from accel_data.map.shared_seed import SharedSeed
from accel_data.map.skip import swapped
from accel_data.map.surroundings import Basis, Surroundings, fingerprint_of
from accel_data.order.counter_rng import derive_key
from accel_data.order.cursor import Cursor
from accel_data.order.iterators import continuing, is_consumed_once
from accel_data.order.orders import Epoch, Order
from accel_data.private import copied
from accel_data.source import KIND_KEY, Json, Source
from accel_data.stateful_dataloader import is_torchs_iteration
from accel_state.errors import DataError, DataStateError

SEED_KEY = "seed"
SAMPLER_KEY = "sampler"
_OWN_LOOKAHEAD = 1024
"""Batches that the iteration of a user's DataLoader may read ahead of the loop, beside what the workers have."""


@final
class MapSource(Source):
    """Batches of a map-style DataLoader for one data rank.

    Attributes:
        seed: determines, with the epoch, every order; equal on all ranks. None if the order is always the same.
    """

    reads_alone = True

    def __init__(self, spec: MapSpec, seed: SharedSeed) -> None:
        parts, loader, shard, options = spec.parts, spec.loader.dataloader, spec.loader.shard, spec.loader.options
        self._shard, self._options, self._parts = shard, options, parts
        self.seed, self._check = seed.value, seed.check
        self._order, self._rank_batch = spec.order, spec.rank_batch
        self._last_epoch: tuple[tuple[Order, int | None, int], Epoch] | None = None
        self._last_sharding: tuple[tuple[Order, bool], Sharding] | None = None
        self._described: tuple[Order, dict[str, Json]] | None = None
        self._generator: torch.Generator | None = None
        self._passes: list[MapPass] = []
        self._sampler_start: Json = None
        self._sampler_pending: Json = None
        self._sampler_epoch: int | None = None
        self._walked = False
        self._passed: tuple[Cursor, int] | None = None
        self._begun: tuple[int, Order] | None = None
        self.even_batches = options.even_batches
        self._basis = Basis(parts.sampler)
        self._surroundings = Surroundings(parts, loader.dataset, walked=self._order is None)
        self._batches = IndexBatches(parts, shard, batch_size=self._rank_batch, options=options)
        self.dataloader = swapped(loader, self._batches, slot=parts.slot)
        self._batches.length = self.length(Cursor())
        self._measured: bool | None = self.even_batches
        self.total_batch_size = (self._rank_batch or 1) * shard.count
        self.global_batch_size = options.global_batch_size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last_epoch": None, "_generator": None, "_passes": []}

    @property
    def total_dataset_length(self) -> int | None:  # type: ignore[override]
        """Samples of one epoch, if the sampler or the dataset has a length."""
        if self._order is not None:
            return len(self._order)
        size = None if self._parts.own_batch_sampler else sized(self._parts.sampler)
        return sized(self.dataloader.dataset) if size is None else size

    def _sharding(self, total: int) -> ByIndex | Elastic:
        assert self._rank_batch is not None
        options, drop_last = self._options, self._parts.drop_last
        if options.global_batch_size is not None:
            return Elastic(
                total=total,
                batch_size=self._rank_batch,
                num_ranks=self._shard.count,
                global_batch=options.global_batch_size,
                drop_last=drop_last,
            )
        return ByIndex(
            total=total,
            batch_size=self._rank_batch,
            num_ranks=self._shard.count,
            even=self.even_batches,
            drop_last=drop_last,
        )

    def _computed(self, order: Order) -> Sharding:
        """Returns the sharding of an order; caches the last one, because every pass needs it."""
        key = (order, self.even_batches)
        if self._last_sharding is None or self._last_sharding[0] != key:
            self._last_sharding = (key, self._cut_from(order))
        return self._last_sharding[1]

    def _cut_from(self, order: Order) -> Sharding:
        plain = self._sharding(len(order))
        if self._options.sharding != "node":
            return plain
        assert isinstance(plain, ByIndex)
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return ByNode(num_nodes=self._options.num_nodes, **fields)

    def _cut(self) -> DrawnRows:
        parts = self._parts
        split = self._options.split_batches
        return DrawnRows(self._shard.count, parts.batch_size, split, self.even_batches, parts.drop_last)

    def _order_of(self, epoch: int) -> Order | None:
        """Returns the order of an epoch; an epoch that is finished over its original samples has its own order."""
        return self._begun[1] if self._begun is not None and self._begun[0] == epoch else self._order

    def _index_stream(self, cursor: Cursor, trail: IndexTrail | None) -> IndexStream:
        parts, shard, order = self._parts, self._shard, self._order_of(cursor.epoch)
        loader: Any = self.dataloader
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        ahead += 0 if is_torchs_iteration(loader) else _OWN_LOOKAHEAD
        if order is not None:
            epoch = self._epoch_of(order, cursor.epoch)
            if callable(self._options.sharding):
                return FunctionStream(epoch, self._options.sharding, start=cursor, shard=shard, ahead=ahead)
            return OrderStream(
                epoch, self._computed(order), start=cursor, shard=shard, num_nodes=self._options.num_nodes
            )
        self._walk()
        size, rng = sized(loader.dataset), self._rng(cursor.epoch)
        if parts.own_batch_sampler:
            cut = self._cut()
            return BatchSamplerStream(
                parts.batch_sampler, cut, start=cursor, shard=shard, size=size, rng=rng, ahead=ahead, trail=trail
            )
        sharding = self._sharding(UNKNOWN_TOTAL)
        return ItemStream(parts.sampler, sharding, start=cursor, shard=shard, size=size, rng=rng, trail=trail)

    def _walk(self) -> None:
        """Records that the user's sampler is iterated over; a generator can be only once.

        Raises:
            DataError: the sampler is a generator or another iterator, and a pass has drawn from it already.
        """
        walked = self._parts.batch_sampler if self._parts.own_batch_sampler else self._parts.sampler
        if self._walked and is_consumed_once(walked):
            kind = "batch sampler" if self._parts.own_batch_sampler else "sampler"
            raise DataError(
                f"the {kind} is a {type(walked).__name__}, which gives its indices once, and a pass of this loader (or "
                "skip_first_batches) has drawn from it: what it drew ahead is lost. Give a list, or a class whose "
                "__iter__ begins again"
            )
        self._walked = True

    def _epoch_of(self, order: Order, epoch: int) -> Epoch:
        """Returns the indices of an epoch; caches the last ones, because a pass is often left and started again."""
        key = (order, self.seed, epoch)
        if self._last_epoch is None or self._last_epoch[0] != key:
            self._last_epoch = (key, order(self.seed or 0, epoch))
        return self._last_epoch[1]

    def _rng(self, epoch: int) -> SeededGlobals:
        return SeededGlobals(derive_key(self.seed or 0, epoch))

    def begin(self, cursor: Cursor) -> MapPass:
        """Sets the index stream from ``cursor`` as the sampler and iterates over the DataLoader."""
        self._passes = [one for one in self._passes if not one.is_over]
        inside = self._nests(cursor.epoch) or cursor.samples > 0
        replayed = self._enter_epoch(cursor.epoch)
        self._follow_sampler(inside=inside)  # the dataset may have another length since it was told of its epoch
        if self._measured != self.even_batches:
            self._measured, self._batches.length = self.even_batches, self.length(Cursor())
        trail = None if self._check is None or self._order is not None else self._check.trail(cursor)
        self._batches.index_stream = self._index_stream(cursor, trail)
        seed = self.initial_seed(cursor) if self.dataloader.num_workers else None
        seeds = self._seeded(cursor.epoch, seed)
        begun = MapPass(MapPlan(self._readers(), self._batches, seeds, seed, trail=trail, closed=replayed))
        self._passes.append(begun)
        return begun

    def _nests(self, epoch: int) -> bool:
        """Whether a pass over ``epoch`` that begins now is inside one over that epoch."""
        return epoch == self._sampler_epoch and not all(one.is_over for one in self._passes)

    def _readers(self) -> DataLoader[Any]:
        """Returns the loader, or a copy with its own workers if persistent workers still read for another pass.

        torch's loader has one set of persistent workers, and would end that pass to start this one.
        """
        loader = self.dataloader
        if not self._passes or not loader.persistent_workers:
            return loader
        return copied(loader, persistent_workers=False)

    def _follow_sampler(self, *, inside: bool = False) -> None:
        """Rebuilds the order if the user has changed the sampler's weights, indices or number of samples.

        Inside an epoch, only a changed length rebuilds it.
        """
        sampler = self._parts.sampler
        if self._order is None:
            return
        if len(self._order) != sized(sampler) or (not inside and self._basis.differs(sampler)):
            self._order, self._basis = order_of(self._parts, self._options), Basis(sampler)
            self._measured = None

    def _seeded(self, epoch: int, initial_seed: int | None) -> torch.Generator:
        """Returns the generator of the workers' seeds; seeded only if there are workers, because seeding takes time."""
        generator = self._generator = self._generator or torch.Generator()
        if initial_seed is not None:
            base, workers = derive_key(initial_seed, epoch, self._shard.index), self.dataloader.num_workers
            generator.manual_seed(base)
            # Persistent workers have a copy of the dataset on which only they can call set_epoch.
            told = epoch if self.dataloader.persistent_workers and self._surroundings.dataset_listens else None
            self._batches.seeds = WorkerSeeds(base, told, workers)
        return generator

    def _enter_epoch(self, epoch: int) -> Callable[[], None] | None:
        """Makes the user's samplers start this epoch in the state with which they started it in the saved run.

        If the epoch is the one entered last, stateful samplers start from the state in which they started it before.
        Inside a pass over it, the returned function, called at the end of the inner pass, restores their current state.
        """
        surroundings, states = self._surroundings, self._sampler_pending
        again = surroundings.kept() if self._nests(epoch) else None
        if not states and epoch == self._sampler_epoch and self._sampler_start:
            states = self._sampler_start
        if states:
            surroundings.load(states)
        self._sampler_pending, self._sampler_epoch = None, epoch
        surroundings.begin(epoch, self.seed or 0)
        self._sampler_start = surroundings.states()
        return again

    def length(self, cursor: Cursor) -> int | None:
        """Computed, or from the ``len`` of the user's sampler."""
        parts, rank = self._parts, self._shard.index
        if callable(self._options.sharding):
            return None
        if parts.own_batch_sampler:
            batches = sized(parts.batch_sampler)
            passed = 0 if not cursor.samples else None
            if self._passed is not None and self._passed[0] == cursor:
                passed = self._passed[1]
            if batches is None or passed is None:
                return None
            last = last_batch_size(parts.batch_sampler)
            return rounds_of(max(batches - passed, 0), self._cut(), rank, last=last)
        order = self._order_of(cursor.epoch)
        if order is not None:
            return batches_of(self._computed(order), cursor.samples, rank)
        total = sized(parts.sampler)
        return None if total is None else batches_of(self._sharding(total), cursor.samples, rank)

    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        """Computes the cursor; for a batch sampler, iterates over its indices."""
        order = self._order_of(cursor.epoch)
        if callable(self._options.sharding):
            return self._skip_by_function(cursor, batches)
        if order is not None:
            return Cursor(cursor.epoch, self._computed(order).seek(cursor.samples, batches))
        if not self._parts.own_batch_sampler:
            total = sized(self._parts.sampler)
            sharding = self._sharding(UNKNOWN_TOTAL if total is None else total)
            return Cursor(cursor.epoch, sharding.seek(cursor.samples, batches))
        self._walk()
        kept = self._enter_epoch(cursor.epoch)
        with self._rng(cursor.epoch):
            stream = continuing(iter(self._parts.batch_sampler))
            _, rest, passed = skip_batches(stream, cursor.samples)
            skipped = list(islice(rounds_in(stream, self._cut(), rest), batches))
        if kept is None:
            self._sampler_pending = self._sampler_start
        else:
            kept()
        after = cursor.advanced(sum(len(batch) for each in skipped for batch in each.batches))
        self._passed = (after, passed + sum(each.taken for each in skipped))
        return after

    @property
    def keeps_state(self) -> bool:
        """Whether the user's samplers have a state."""
        return self._surroundings.keeps_state

    @property
    def ends_together(self) -> bool:
        """Whether all ranks have equally many batches; a sharding function may end anywhere."""
        alike = self.even_batches or self._parts.drop_last
        return self._shard.count == 1 or (alike and not callable(self._options.sharding))

    def is_over(self, cursor: Cursor) -> bool:
        """Computed; False for user samplers and sharding functions, whose end is known only after parts."""
        order = self._order_of(cursor.epoch)
        if order is None or callable(self._options.sharding) or not cursor.samples:
            return False
        return not self._computed(order).steps(cursor.samples)

    def epoch_chosen(self) -> int | None:
        """Returns the epoch that was set on the user's sampler or batch sampler."""
        return self._surroundings.epoch_chosen()

    def announce(self, epoch: int) -> None:
        """Calls ``set_epoch`` of the user's sampler and batch sampler."""
        self._surroundings.announce(epoch)

    def _skip_by_function(self, cursor: Cursor, batches: int) -> Cursor:
        assert callable(self._options.sharding)
        for _ in range(batches):
            share = self._options.sharding(cursor, self._shard)
            if share is None:
                break
            cursor = cursor.advanced(share.advance)
        return cursor

    def record(self, *, between: bool) -> dict[str, Json]:
        """Returns seed, order and identity of the dataset; for stateful samplers, their state at the epoch's start."""
        record: dict[str, Json] = {
            SEED_KEY: self.seed,
            ORDER_KEY: self._description(),
            LENGTH_KEY: sized(self.dataloader.dataset),
            FINGERPRINT_KEY: fingerprint_of(self.dataloader.dataset),
        }
        if not between and self._begun is not None and self._begun[0] == self._sampler_epoch:
            record |= {ORDER_KEY: self._begun[1].describe(), BEGUN_KEY: True}
        states = self._sampler_pending or (self._surroundings.states() if between else self._sampler_start)
        return {**record, SAMPLER_KEY: states} if states else record

    def _description(self) -> dict[str, Json]:
        """Returns the description of the order; cached, because it may read every weight or length."""
        order, parts = self._order, self._parts
        if order is None:
            walked = parts.batch_sampler if parts.own_batch_sampler else parts.sampler
            told, mark = {"kind": "walked", "sampler": type(walked).__qualname__}, fingerprint_of(walked)
            return told if mark is None else {**told, FINGERPRINT_KEY: mark}
        if self._described is None or self._described[0] is not order:
            self._described = (order, order.describe())
        return self._described[1]

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        """See ``dataset_changes``."""
        self._follow_sampler()
        return adapted(self._facts(), record, cursor, warns=self._shard.index == 0)

    def _facts(self) -> DatasetFacts:
        dataset = self.dataloader.dataset
        return DatasetFacts(sized(dataset), fingerprint_of(dataset), self._order, self._description())

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        """Checks that the saved position matches the current data and order, and takes over its seed."""
        if cursor.samples and KIND_KEY in record:
            raise DataStateError(
                f"the position is sample {cursor.samples} of a {record[KIND_KEY]!r} loader, and this loader reads "
                "map-style data in another order. Give each loader its own state, or resume at the start of an epoch"
            )
        self._follow_sampler()
        check_dataset(self._facts(), record, cursor, warns=self._shard.index == 0)
        here = self._description()
        saved = record.get(ORDER_KEY, here)
        order = order_begun(self._order, saved) if record.get(BEGUN_KEY) else None
        if cursor.samples and saved != here and order is None:
            differing = sorted(name for name in {*saved, *here} if saved.get(name) != here.get(name))
            told = ", ".join(f"{name} was {saved.get(name)!r} and is {here.get(name)!r}" for name in differing)
            raise DataStateError(
                f"the position is sample {cursor.samples} of another order: {told}. Use the same sampler, or resume "
                "at the start of an epoch"
            )
        total = self._order if order is None else order
        if total is not None and cursor.samples > len(total):
            raise DataStateError(f"the position is sample {cursor.samples}, but an epoch has {len(total)}")
        self._begun = None if order is None else (cursor.epoch, order)
        self.seed = record.get(SEED_KEY, self.seed)
        self._sampler_pending = record.get(SAMPLER_KEY)
        self.restore_seed(cursor, private)
