"""Samplers under the names that users of other libraries know."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accel_data import (
    BatchSamplerShard,
    LoaderOptions,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    prepare_data_loader,
    prepare_loader,
)
from accel_state.parallelism.config import DataShard

BATCHES = BatchSampler(SequentialSampler(range(16)), 4, False)


def test_the_seedable_sampler_yields_torchs_permutation_of_seed_plus_epoch():
    sampler = SeedableRandomSampler(range(10), data_seed=42)
    for epoch in range(2):
        expected = torch.randperm(10, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        assert list(sampler) == expected
    assert sampler.epoch == 2


def test_the_seedable_sampler_counts_an_epoch_only_when_it_is_exhausted():
    sampler = SeedableRandomSampler(range(10), data_seed=42)
    next(iter(sampler))
    assert sampler.epoch == 0
    sampler.set_epoch(5)
    assert sampler.epoch == 5


def test_the_seedable_samplers_seed_is_torchs_by_default():
    torch.manual_seed(77)
    assert SeedableRandomSampler(range(10)).initial_seed == 77


@pytest.mark.parametrize("extra", [{}, {"num_samples": 23}, {"replacement": True, "num_samples": 5}])
def test_a_prepared_loader_replaces_a_random_sampler_by_a_seedable_one_with_the_same_options(extra):
    loader = prepare_loader(
        DataLoader(range(10), sampler=RandomSampler(range(10), **extra)),
        DataShard(0, 1),
        options=LoaderOptions(use_seedable_sampler=True, data_seed=3),
    )
    sampler = loader.batch_sampler.sampler
    assert (sampler.replacement, sampler.num_samples) == (extra.get("replacement", False), extra.get("num_samples", 10))
    if not sampler.replacement:
        expected = list(SeedableRandomSampler(range(10), data_seed=3, **extra))
        assert [int(batch) for batch in loader] == expected


def test_skip_batch_sampler_drops_from_the_front():
    sampler = SkipBatchSampler(BATCHES, 2)
    assert list(sampler) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (len(sampler), sampler.total_length) == (2, 4)
    assert (sampler.batch_size, sampler.drop_last) == (4, False)


def test_batch_sampler_shard_shows_what_it_was_made_of():
    shard = BatchSamplerShard(BATCHES, 2, 1, even_batches=False)
    assert shard.batch_sampler is BATCHES
    assert shard.sampler is BATCHES.sampler
    assert (shard.num_processes, shard.process_index, shard.split_batches, shard.even_batches) == (2, 1, False, False)
    assert (shard.batch_size, shard.drop_last, shard.total_length) == (4, False, 4)


def test_batch_sampler_shard_hands_the_epoch_down():
    inner = BatchSampler(SeedableRandomSampler(range(8), data_seed=1), 2, False)
    BatchSamplerShard(inner, 2, 0).set_epoch(6)
    assert inner.sampler.epoch == 6


def test_a_sharded_batch_sampler_in_a_plain_dataloader_works():
    parts = [list(DataLoader(range(16), batch_sampler=BatchSamplerShard(BATCHES, 2, rank))) for rank in range(2)]
    assert [torch.cat(part).tolist() for part in parts] == [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_not_sharded_a_second_time(shuffle):
    dataset = TensorDataset(torch.arange(12))
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=shuffle, seed=9)
        loader = prepare_loader(DataLoader(dataset, sampler=sampler, batch_size=2), DataShard(rank, 2))
        parts += [int(i) for (batch,) in loader for i in batch]
    assert sorted(parts) == list(range(12))


@pytest.mark.parametrize("batch_size", [4, None])
def test_get_sampler_finds_the_sampler_of_single_indices(batch_size):
    inner = SequentialSampler(range(16))
    if batch_size is None:
        loader = DataLoader(range(16), sampler=BatchSampler(inner, 4, False), batch_size=None)
    else:
        loader = DataLoader(range(16), sampler=inner, batch_size=4)
    assert get_sampler(loader) is inner
    assert get_sampler(prepare_data_loader(loader, num_processes=2, process_index=0)) is inner


def test_get_sampler_of_a_batch_sampler_without_one_is_none():
    assert get_sampler(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])) is None


@pytest.mark.parametrize(
    ("names", "shape", "rank", "expected"),
    [
        (("dp", "tp"), (2, 2), 2, (1, 2)),
        (("dp", "tp"), (2, 2), 3, (1, 2)),
        (("pp", "dp"), (2, 2), 0, (0, 2)),
        (("pp", "dp"), (2, 2), 2, (0, 2)),
        (("pp", "dp"), (2, 2), 3, (1, 2)),
        (("cp", "tp"), (2, 2), 3, (0, 1)),
        (("dp_replicate", "dp_shard"), (2, 2), 3, (3, 4)),
        (("tp",), (2,), 3, (1, 2)),
        ((), (), 1, (1, 4)),
    ],
)
def test_ranks_of_a_mesh_that_work_on_one_sample_share_a_part(names, shape, rank, expected):
    class Mesh:
        mesh_dim_names = names

    Mesh.shape = shape
    loader = prepare_data_loader(
        DataLoader(range(16), batch_size=2), num_processes=4, process_index=rank, torch_device_mesh=Mesh()
    )
    assert (loader.batch_sampler.process_index, loader.batch_sampler.num_processes) == expected
