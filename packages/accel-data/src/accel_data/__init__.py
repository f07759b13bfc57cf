"""Sharded data loading that resumes at the next undelivered sample on any number of processes.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from accel_data._version import __version__ as __version__
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_data.collate import PaddingCollator as PaddingCollator
    from accel_data.collate import pad_sequences as pad_sequences
    from accel_data.collate import padding_share as padding_share
    from accel_data.collate_budget import TokenBudget as TokenBudget
    from accel_data.collate_budget import TokenBudgetSampler as TokenBudgetSampler
    from accel_data.cursor import Cursor as Cursor
    from accel_data.cursor import ShardFunction as ShardFunction
    from accel_data.cursor import Share as Share
    from accel_data.cursor import Step as Step
    from accel_data.cursor import Window as Window
    from accel_data.iterable_shard import IterableDatasetShard as IterableDatasetShard
    from accel_data.loader import PreparedLoader as PreparedLoader
    from accel_data.observer import LoaderObserver as LoaderObserver
    from accel_data.options import LoaderOptions as LoaderOptions
    from accel_data.orders import Epoch as Epoch
    from accel_data.orders import Order as Order
    from accel_data.orders import Replacement as Replacement
    from accel_data.orders import Sequential as Sequential
    from accel_data.orders import Shuffled as Shuffled
    from accel_data.orders import Subset as Subset
    from accel_data.orders_special import LengthGrouped as LengthGrouped
    from accel_data.orders_special import NodeBlocks as NodeBlocks
    from accel_data.orders_special import SeededPermutation as SeededPermutation
    from accel_data.orders_special import Weighted as Weighted
    from accel_data.placement import Placed as Placed
    from accel_data.placement import Placer as Placer
    from accel_data.placement import placer_for as placer_for
    from accel_data.prepare import prepare_data_loader as prepare_data_loader
    from accel_data.prepare import prepare_loader as prepare_loader
    from accel_data.prepare import skip_first_batches as skip_first_batches
    from accel_data.sample_random import SampleRng as SampleRng
    from accel_data.sample_random import sample_rng as sample_rng
    from accel_data.samplers import BatchSamplerShard as BatchSamplerShard
    from accel_data.samplers import OrderSampler as OrderSampler
    from accel_data.samplers import SeedableRandomSampler as SeedableRandomSampler
    from accel_data.samplers import SkipBatchSampler as SkipBatchSampler
    from accel_data.samplers import get_sampler as get_sampler
    from accel_data.sequences import split_sequences as split_sequences
    from accel_data.sharding import ByIndex as ByIndex
    from accel_data.sharding import ByNode as ByNode
    from accel_data.sharding import Elastic as Elastic
    from accel_data.sharding import Rows as Rows
    from accel_data.sharding import Sharding as Sharding
    from accel_data.sharding import real_counts as real_counts
    from accel_data.shuffle_buffer import ShuffleBuffer as ShuffleBuffer
    from accel_data.source import Pass as Pass
    from accel_data.source import Source as Source

_EXPORTS = {
    "accel_data.collate": (
        "PaddingCollator",
        "pad_sequences",
        "padding_share",
    ),
    "accel_data.collate_budget": (
        "TokenBudget",
        "TokenBudgetSampler",
    ),
    "accel_data.cursor": (
        "Cursor",
        "ShardFunction",
        "Share",
        "Step",
        "Window",
    ),
    "accel_data.iterable_shard": ("IterableDatasetShard",),
    "accel_data.loader": ("PreparedLoader",),
    "accel_data.observer": ("LoaderObserver",),
    "accel_data.options": ("LoaderOptions",),
    "accel_data.orders": (
        "Epoch",
        "Order",
        "Replacement",
        "Sequential",
        "Shuffled",
        "Subset",
    ),
    "accel_data.orders_special": (
        "LengthGrouped",
        "NodeBlocks",
        "SeededPermutation",
        "Weighted",
    ),
    "accel_data.placement": (
        "Placed",
        "Placer",
        "placer_for",
    ),
    "accel_data.prepare": (
        "prepare_data_loader",
        "prepare_loader",
        "skip_first_batches",
    ),
    "accel_data.sample_random": (
        "SampleRng",
        "sample_rng",
    ),
    "accel_data.samplers": (
        "BatchSamplerShard",
        "OrderSampler",
        "SeedableRandomSampler",
        "SkipBatchSampler",
        "get_sampler",
    ),
    "accel_data.sequences": ("split_sequences",),
    "accel_data.sharding": (
        "ByIndex",
        "ByNode",
        "Elastic",
        "Rows",
        "Sharding",
        "real_counts",
    ),
    "accel_data.shuffle_buffer": ("ShuffleBuffer",),
    "accel_data.source": (
        "Pass",
        "Source",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
