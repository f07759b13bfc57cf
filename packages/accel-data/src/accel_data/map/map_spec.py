"""Specification of a map-style loader: its samplers, the order that replaces them, and the batch size of a rank."""

from dataclasses import dataclass
from typing import final

from accel_data.loader_spec import LoaderSpec
from accel_data.map.dataloader_parts import DataLoaderParts, order_of, read_dataloader
from accel_data.map.index_stream import sized
from accel_data.map.sharding import check_split
from accel_data.order.orders import Order
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class MapSpec:
    """Facts of a map-style loader.

    Attributes:
        parts: the user's samplers.
        order: the order that is computed in their place; None: the samplers are iterated.
        rank_batch: batch size of one rank; None: batches have any size.
        length: samples of the dataset, if known.

    Raises:
        ConfigError: an option needs a computable order, or batches that accel makes.
    """

    loader: LoaderSpec
    parts: DataLoaderParts
    order: Order | None
    rank_batch: int | None
    length: int | None

    def __post_init__(self) -> None:
        parts, options = self.parts, self.loader.options
        if options.sharding != "index" and self.order is None:
            name = type(parts.batch_sampler if parts.own_batch_sampler else parts.sampler).__name__
            raise ConfigError(
                f"sharding={options.sharding!r} computes positions, but {name} has to be walked; use a sampler of "
                "torch's, an accel_data.OrderSampler, or sharding='index'"
            )
        if options.global_batch_size is not None and parts.own_batch_sampler:
            raise ConfigError(
                f"global_batch_size={options.global_batch_size} cuts batches by itself, but "
                f"{type(parts.batch_sampler).__name__} already makes them; give the loader batch_size and sampler"
            )

    @classmethod
    def of(cls, spec: LoaderSpec) -> "MapSpec":
        """Decomposes the DataLoader of ``spec`` without changing it.

        Raises:
            ConfigError: as above, or ``split_batches`` has no batch size that it can divide.
        """
        length, parts = sized(spec.dataloader.dataset), read_dataloader(spec.dataloader, spec.options)
        size = parts.batch_size
        rank_batch = check_split(size, spec.shard.count) if spec.options.split_batches else size
        return cls(spec, parts, order_of(parts, spec.options), rank_batch, length)
