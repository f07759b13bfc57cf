"""Abilities of an iterable dataset (sharding, seeking), found without importing the library it comes from."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, final

from accel_state.errors import ConfigError

Mode = Literal["stride", "native", "given", "left"]
"""Readers keep every so many elements of one stream; the dataset cuts itself; it was cut; "left": see ``Left``."""
ALREADY_SHARDED = "already_sharded"
"""An attribute a dataset may set to say that it yields this rank's part only."""


@final
@dataclass(frozen=True, slots=True)
class StreamTraits:
    """What is known of a dataset before it is read.

    Attributes:
        can_shard: it has ``shard(num_shards=, index=)``.
        num_shards: into how many parts it can be cut at most; None: any number, or unknown.
        given: why it is taken to yield one rank's part only; None: it is taken to yield everything.
        seekable: it has ``state_dict`` and ``load_state_dict``.
    """

    can_shard: bool = False
    num_shards: int | None = None
    given: str | None = None
    seekable: bool = False


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """How the ranks share one dataset, why, and how often each element is read over all readers."""

    mode: Mode
    reason: str
    amplification: int = 1


def inspect_stream(dataset: object) -> StreamTraits:
    """The traits of a dataset: torch's, Hugging Face ``datasets``' and any with the same methods.

    ``datasets.distributed.split_dataset_by_node`` leaves a ``_distributed`` record on what it returns.
    """
    given = None
    if getattr(dataset, "_distributed", None) is not None:
        given = "it was split by node"
    elif getattr(dataset, ALREADY_SHARDED, False) is True:
        given = f"it has {ALREADY_SHARDED} = True"
    shards = next((n for n in (getattr(dataset, name, None) for name in ("num_shards", "n_shards")) if _count(n)), None)
    return StreamTraits(_has_shard(dataset), shards, given, is_seekable(dataset))


def choose_reading(
    traits: StreamTraits, *, shards: int, workers: int = 0, already_sharded: bool = False, exact: bool = False
) -> Reading:
    """How ``shards`` ranks with ``workers`` loader workers each read a dataset with these traits.

    ``already_sharded``: the user says that it yields this rank's part. ``exact``: never ask it to shard, so that its
    order and every saved position hold for any number of ranks.
    """
    readers = max(workers, 1)
    given = traits.given or ("already_sharded=True" if already_sharded else None)
    if given is not None:
        if exact:
            raise ConfigError(
                "exact_streams needs the whole stream on every rank, but this dataset yields one rank's part "
                f"({given}): give the dataset before it was split, or drop exact_streams"
            )
        return Reading("given", given)
    if shards == 1:
        return Reading("stride", "one rank reads everything", readers)
    if exact:
        return Reading("stride", "exact_streams=True", shards * readers)
    if not traits.can_shard:
        return Reading("stride", "it has no shard(num_shards, index)", shards * readers)
    if traits.num_shards is not None and traits.num_shards < shards:
        return Reading("stride", f"it has {traits.num_shards} shards for {shards} ranks", shards * readers)
    return Reading("native", f"it cuts itself into {traits.num_shards or 'any number of'} shards")


def amplification_warning(reading: Reading, *, name: str, shards: int, workers: int) -> str:
    """What is said once to a user whose readers all read everything."""
    return (
        f"every reader of {name} reads the whole stream and keeps its part, because {reading.reason}: {shards} rank"
        f"{'s' * (shards > 1)} x {max(workers, 1)} worker{'s' * (workers > 1)} = {shards * max(workers, 1)} times the "
        "reading and decoding of one pass. Cheaper: give the dataset shard(num_shards, index); split it yourself and "
        "say already_sharded=True; or let one rank read for all with dispatch_batches=True"
    )


def is_seekable(stream: object) -> bool:
    """Whether a dataset or iterator can say where it is and go back there without losing anything.

    Hugging Face ``datasets`` forget what is in a shuffle buffer when a state is loaded (their documentation says so):
    a dataset with such a buffer is read again up to the position instead.
    """
    has_state = callable(getattr(stream, "state_dict", None)) and callable(getattr(stream, "load_state_dict", None))
    return has_state and not _has_shuffle_buffer(getattr(stream, "_ex_iterable", None))


def _has_shuffle_buffer(stage: object) -> bool:
    """Whether any stage of a ``datasets`` pipeline is a buffer."""
    if stage is None:
        return False
    if type(stage).__name__.startswith("BufferShuffled"):
        return True
    sources = getattr(stage, "ex_iterables", None)
    return any(map(_has_shuffle_buffer, [getattr(stage, "ex_iterable", None), *(sources or ())]))


def shard_natively(dataset: Any, shards: int, index: int) -> Any:
    """This rank's part of a dataset that can be asked."""
    return dataset.shard(num_shards=shards, index=index)


def _has_shard(dataset: object) -> bool:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        return False
    try:
        inspect.signature(shard).bind(num_shards=2, index=0)
    except (TypeError, ValueError):
        return False
    return True


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
