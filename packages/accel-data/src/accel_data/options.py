"""Options of loaders: sharding, padding and moving, in one frozen record."""

from dataclasses import dataclass
from typing import Literal, final

from accel_data.order.cursor import ShardFunction
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Choices that hold for every loader prepared with them; the defaults are those users of this field know.

    Attributes:
        split_batches: the loader's batch size is that of all ranks together, each takes an equal slice of a batch.
            Off: it is each rank's own, and a step takes as many batches as there are ranks.
        dispatch_batches: rank 0 alone reads, and sends every rank its part. None: only for iterable datasets that
            have to be put on a device.
        even_batches: repeat samples from the start of the epoch until every rank has equally many full batches.
        use_seedable_sampler: shuffle with ``randperm`` seeded by (seed + epoch), as ``SeedableRandomSampler`` does.
        data_seed: the seed of every order; None: drawn from the sampler's generator, or from torch's.
        non_blocking: copies to the device may overlap with what the host does next.
        use_stateful_dataloader: iterable datasets are read through torchdata's ``StatefulDataLoader``, and the state of
            each worker's stream is noted after every batch instead of as often as is cheap.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches. The loader's batch size is
            then the most that one rank takes at once; the same global batches come out on any number of ranks.
        sharding: "index" interleaves batches over ranks, "node" gives each of ``num_nodes`` nodes one contiguous
            range of the dataset, and a function decides by itself.
        num_nodes: nodes that hold a part of the dataset each, for ``sharding="node"``.
        already_sharded: an iterable dataset yields this rank's part only (found out by itself where it can be).
        exact_streams: never let an iterable dataset shard itself over ranks or workers. Every reader then reads all of
            it, and a position in it holds for any number of ranks and workers.
        allow_changed_data: load a position inside an epoch of a dataset that has changed since, with a
            warning in numbers instead of a refusal; ``PreparedLoader.load_state_dict`` says what follows.

    Raises:
        ConfigError: two choices exclude each other.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    global_batch_size: int | None = None
    sharding: Literal["index", "node"] | ShardFunction = "index"
    num_nodes: int = 1
    already_sharded: bool = False
    exact_streams: bool = False
    allow_changed_data: bool = False

    def __post_init__(self) -> None:
        size = self.global_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"global_batch_size is {size!r}; it must be a whole number of at least 1, or None")
        if size is not None and self.split_batches:
            raise ConfigError(
                "split_batches and global_batch_size both say what a batch of all ranks is; give only "
                "global_batch_size, with the most that fits on one rank as the loader's batch_size"
            )
        if not callable(self.sharding) and self.sharding not in ("index", "node"):
            raise ConfigError(f"sharding is {self.sharding!r}; it is 'index', 'node' or a function of (cursor, shard)")
        if self.sharding != "index" and (size is not None or self.split_batches):
            other = "split_batches" if self.split_batches else "global_batch_size"
            raise ConfigError(f"{other} needs sharding='index'; sharding={self.sharding!r} cuts batches by itself")
        if self.num_nodes < 1:
            raise ConfigError(f"num_nodes is {self.num_nodes}; it must be at least 1")
