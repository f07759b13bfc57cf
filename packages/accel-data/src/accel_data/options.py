"""Options of loaders: sharding, padding and device copies, in one frozen record."""

from dataclasses import dataclass
from typing import Literal, final

from accel_data.order.cursor import ShardFunction
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of a prepared loader; the defaults are those of Accelerate.

    Attributes:
        split_batches: the loader's batch size is that of all ranks together, and each rank takes an equal slice of a
            batch. Otherwise it is that of each rank, and a step takes as many batches as there are ranks.
        dispatch_batches: rank 0 alone reads, and sends every rank its rows. None: only for iterable datasets whose
            batches are moved to a device.
        even_batches: repeat samples from the start of the epoch until every rank has equally many full batches.
        use_seedable_sampler: shuffle with ``randperm`` seeded by (seed + epoch), as ``SeedableRandomSampler`` does.
        data_seed: the seed of every order; None: drawn from the sampler's generator, or from torch's.
        non_blocking: copies to the device may overlap with the host's next operations.
        use_stateful_dataloader: iterable datasets are read through torchdata's ``StatefulDataLoader``, and the state of
            each worker's stream is recorded after every batch instead of as often as is cheap.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches. The loader's batch size is
            then the upper limit of one rank's micro-batch; any number of ranks reads the same global batches.
        sharding: "index" interleaves batches over ranks, "node" gives each of ``num_nodes`` nodes one contiguous range
            of the dataset, and a function chooses positions itself.
        num_nodes: nodes that hold a shard of the dataset each, for ``sharding="node"``.
        already_sharded: an iterable dataset yields only this rank's shard (detected automatically where possible).
        exact_streams: never let an iterable dataset shard itself over ranks or workers. Every reader then reads all of
            it, and a position in it is valid for any number of ranks and workers.
        allow_changed_data: load a position inside an epoch of a dataset that has changed since, with a warning in
            numbers instead of an error; see ``PreparedLoader.load_state_dict``.

    Raises:
        ConfigError: two options exclude each other.
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
