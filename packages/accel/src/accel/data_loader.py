"""Loaders and samplers under Accelerate's import path."""

from accel_data.iterable.dataset_shard import IterableDatasetShard as IterableDatasetShard
from accel_data.loader import PreparedLoader as PreparedLoader
from accel_data.map.samplers import BatchSamplerShard as BatchSamplerShard
from accel_data.map.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel_data.map.samplers import SkipBatchSampler as SkipBatchSampler
from accel_data.map.samplers import get_sampler as get_sampler
from accel_data.prepare import prepare_data_loader as prepare_data_loader
from accel_data.prepare import skip_first_batches as skip_first_batches
