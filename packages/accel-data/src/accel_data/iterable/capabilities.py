"""Capabilities of an iterable dataset, and the one strategy that follows from them, with its promise."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, final

import torch

from accel_state.errors import ConfigError

Mode = Literal["stride", "native", "given", "left"]
"""The names in saved states: one stream that all ranks read; ``shard()``; sharded before; a merged remainder."""


@final
@dataclass(frozen=True, slots=True)
class StreamCapabilities:
    """What one dataset can do, found by its methods, so that the library it comes from is never imported.

    Attributes:
        shardable: it has ``shard(num_shards=, index=)``.
        num_shards: into how many shards it can be cut at most; None: any number, or unknown.
        presharded: why it is taken to yield this rank's elements only (the user may set ``already_sharded = True`` on
            it); None: it is taken to yield all.
        seekable: it has ``state_dict`` and ``load_state_dict``, and loses nothing between the two.
        worker_dependent: it reads ``get_worker_info()``, so that each worker's stream is one of its own: with several
            workers it divides itself among them, and with one its order may be another than with none. None: not known
            before a worker reads it.
    """

    shardable: bool = False
    num_shards: int | None = None
    presharded: str | None = None
    seekable: bool = False
    worker_dependent: bool | None = None


_MERGED = "on others the rest of the epoch is read as one merged stream"
_PROMISES: dict[tuple[Mode, bool], tuple[str, str]] = {
    ("stride", False): ("one stream", "exact on any number of ranks and workers"),
    ("stride", True): ("worker streams", f"exact with as many workers; {_MERGED}"),
    ("native", False): ("shards", f"exact on as many ranks; {_MERGED}"),
    ("native", True): ("shards of workers", f"exact on as many ranks and workers; {_MERGED}"),
    ("given", False): ("sharded before", "exact on as many ranks; refused on others"),
    ("given", True): ("sharded before, of workers", "exact on as many ranks and workers; refused on others"),
    ("left", False): ("merged stream", "exact on any number of ranks and workers until the epoch ends"),
}
"""By mode, and whether each worker reads a stream of its own: the name of the strategy, and its promise."""
_UNDIVIDED = "it does not divide itself by get_worker_info()"


@final
@dataclass(frozen=True, slots=True)
class ReadStrategy:
    """How ``ranks`` with ``workers`` loader workers each (0: none) share one dataset, and why.

    ``divided``: each worker reads a stream of its own; None: only reading tells. ``seekable``: as the dataset is.
    """

    mode: Mode
    reason: str
    ranks: int = 1
    workers: int = 0
    divided: bool | None = False
    seekable: bool = False

    @property
    def name(self) -> str:
        """The name of the strategy, as documentation and messages use it."""
        return _PROMISES[self.mode, bool(self.divided)][0]

    @property
    def promise(self) -> str:
        """What a position that was saved inside an epoch is good for."""
        how = "seeks" if self.seekable and self.mode != "left" else "reads again from the start of the epoch"
        return f"{_PROMISES[self.mode, bool(self.divided)][1]}; a resume {how}"

    @property
    def strided(self) -> bool:
        """Whether all ranks read the same stream, or streams, and each keeps a part."""
        return self.mode in ("stride", "left")

    @property
    def amplification(self) -> int | None:
        """How often an element is read, over all ranks and workers, for each time that it is delivered."""
        if self.divided is None and self.workers > 1:
            return None
        return (self.ranks if self.strided else 1) * (1 if self.divided else max(self.workers, 1))

    def warning(self, dataset: str) -> str | None:
        """What a user is told once, with numbers, when elements are read in vain; None: none are, or not known."""
        if (self.amplification or 1) == 1:
            return None
        ranks, workers = self.ranks if self.strided else 1, 1 if self.divided else max(self.workers, 1)
        reason = self.reason if self.strided and (ranks > 1 or self.mode == "left") else _UNDIVIDED
        return (
            f"every reader of {dataset} reads its stream in full and keeps a stride, because {reason}: {ranks} rank"
            f"{'s' * (ranks > 1)} x {workers} worker{'s' * (workers > 1)} = {ranks * workers} times the reading and "
            f"decoding of one pass. (ReadStrategy: {self.name}, {self.promise}.) Cheaper: give the dataset shard("
            "num_shards, index), and divide it by get_worker_info() in __iter__; split it yourself and say "
            "already_sharded=True; or let one rank read for all with dispatch_batches=True"
        )


def resolve(
    capabilities: StreamCapabilities,
    *,
    ranks: int,
    workers: int = 0,
    already_sharded: bool = False,
    exact: bool = False,
) -> ReadStrategy:
    """The strategy by which ``ranks`` with ``workers`` loader workers each share a dataset.

    ``already_sharded``: the user declares that it yields this rank's elements. ``exact``: the dataset neither shards
    itself nor sees its workers, so that every position holds for any number of both; raises ``ConfigError`` with a
    dataset that yields this rank's elements only.
    """
    divided, seekable = False if exact or not workers else capabilities.worker_dependent, capabilities.seekable
    presharded = capabilities.presharded or ("already_sharded=True" if already_sharded else None)
    if presharded is not None:
        if exact:
            raise ConfigError(
                "exact_streams needs the full stream on every rank, but this dataset yields one rank's part "
                f"({presharded}): give the dataset before it was split, or drop exact_streams"
            )
        return ReadStrategy("given", presharded, ranks, workers, divided, seekable)
    shards = capabilities.num_shards
    if exact:
        reason = "exact_streams=True"
    elif ranks == 1:
        reason = "one rank reads everything"
    elif not capabilities.shardable:
        reason = "it has no shard(num_shards, index)"
    elif shards is not None and shards < ranks:
        reason = f"it has {shards} shards for {ranks} ranks"
    else:
        return ReadStrategy("native", f"it has {shards or 'any number of'} shards", ranks, workers, divided, seekable)
    return ReadStrategy("stride", reason, ranks, workers, divided, seekable)


def inspect_stream(dataset: object, *, in_worker: bool = False) -> StreamCapabilities:
    """The capabilities of a dataset: torch's, Hugging Face ``datasets``' and any with the same methods.

    ``in_worker``: workers of a DataLoader read it.
    """
    presharded = None  # split_dataset_by_node leaves a record on what it returns
    if getattr(dataset, "_distributed", None) is not None:
        presharded = "it was split by node"
    elif getattr(dataset, "already_sharded", False) is True:
        presharded = "it has already_sharded = True"
    counts = (getattr(dataset, name, None) for name in ("num_shards", "n_shards"))
    shards = next((n for n in counts if isinstance(n, int) and not isinstance(n, bool)), None)
    return StreamCapabilities(_has_shard(dataset), shards, presharded, is_seekable(dataset, in_worker=in_worker))


def is_seekable(stream: object, *, in_worker: bool = False) -> bool:
    """Whether a dataset or iterator saves and loads its position without losing anything.

    Hugging Face ``datasets`` forget what is in a shuffle buffer when a state is loaded (their documentation says so),
    and in a worker they load the state of the worker's shards into the undivided pipeline first, which fails if it
    concatenates datasets: it then has other parts. A ``state_dict`` that has to be told how many samples were delivered
    (of MosaicML's and Lightning's streaming datasets) is for the loaders of those libraries. Such datasets are read
    again up to the position instead.
    """
    has_state = _gives_state(stream) and callable(getattr(stream, "load_state_dict", None))
    unseekable = ("BufferShuffled", "VerticallyConcatenated") if in_worker else ("BufferShuffled",)
    return has_state and not _has_stage(getattr(stream, "_ex_iterable", None), unseekable)


def choose_epoch(dataset: object, epoch: int) -> None:
    """Calls the dataset's ``set_epoch``; where it has none, seeds its ``generator``, so that readers agree."""
    set_epoch, generator = getattr(dataset, "set_epoch", None), getattr(dataset, "generator", None)
    if callable(set_epoch):
        set_epoch(epoch)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(epoch)


def _has_stage(stage: object, kinds: tuple[str, ...]) -> bool:
    """Whether the class of any stage of a ``datasets`` pipeline begins with one of ``kinds``."""
    if stage is None:
        return False
    if type(stage).__name__.startswith(kinds):
        return True
    sources = getattr(stage, "ex_iterables", None) or ()
    return any(_has_stage(source, kinds) for source in (getattr(stage, "ex_iterable", None), *sources))


def _gives_state(stream: object) -> bool:
    """Whether ``state_dict`` can be called without arguments, as far as its signature tells."""
    state_dict = getattr(stream, "state_dict", None)
    if not callable(state_dict):
        return False
    try:
        inspect.signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # it is built in, and has no signature
        pass
    return True


def _has_shard(dataset: Any) -> bool:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        return False
    try:
        inspect.signature(shard).bind(num_shards=2, index=0)
    except (TypeError, ValueError):
        return False
    return True
