"""Loaders of one process among several: their orders, and settings that would lose rows."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from accel.utils import ParallelismConfig
from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.options.handlers import DataLoaderConfiguration
from accel_compat.state.accelerator_state import SharedAcceleratorState


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def read(rank: int, loader: DataLoader[Any], **options: Any) -> list[list[int]]:
    from accelerate.data_loader import prepare_data_loader

    return [batch.tolist() for batch in prepare_data_loader(loader, num_processes=2, process_index=rank, **options)]


@pytest.mark.parametrize("kind", [RandomSampler, WeightedRandomSampler])
def test_several_processes_read_in_the_order_of_the_samplers_generator(kind: type) -> None:
    def sampler() -> Any:
        generator = torch.Generator().manual_seed(3)
        given = (range(16),) if kind is RandomSampler else ([1.0] * 16, 16)
        return kind(*given, generator=generator)

    order = list(sampler())
    ranks = [read(rank, DataLoader(range(16), 2, sampler=sampler())) for rank in (0, 1)]  # type: ignore[arg-type]
    assert [one for pair in zip(*ranks, strict=True) for batch in pair for one in batch] == order


def test_draws_without_a_generator_are_shared_by_one() -> None:
    from accelerate.data_loader import prepare_data_loader

    loader = DataLoader(range(16), 2, sampler=WeightedRandomSampler([1.0] * 16, 16))  # type: ignore[arg-type]
    prepared = prepare_data_loader(loader, num_processes=2, process_index=0, rng_types=["generator"])
    assert prepared.synchronized_generator is loader.sampler.generator is not None
    assert prepared.rng_types == ["generator"]


@pytest.mark.parametrize("data", [range(8), Stream(8)], ids=["map", "stream"])
def test_a_batch_of_one_sample_is_not_split(data: Any) -> None:
    with pytest.raises(ValueError, match=r"batch size \(1\) needs to be a round multiple of the number of processes"):
        read(0, DataLoader(data, 1), split_batches=True)


def dispatched(**options: Any) -> tuple[list[list[int]], int]:
    """The batches of this rank, and the length of the loader, of seven samples in batches of two that rank 0 reads."""
    drop_last = options.pop("drop_last")
    accelerator = CompatAccelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True), **options
    )
    loader = accelerator.prepare(DataLoader(range(7), 2, drop_last=drop_last))  # type: ignore[arg-type]
    found = [batch.tolist() for batch in loader], len(loader)
    SharedAcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("drop_last", "expected"), [(True, [[[0, 1]], [[2, 3]]]), (False, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]])]
)
def test_a_dispatched_batch_that_is_not_full_is_dropped_or_filled(
    rank: int, drop_last: bool, expected: list[list[list[int]]]
) -> None:
    assert dispatched(drop_last=drop_last) == (expected[rank], len(expected[rank]))


@pytest.mark.ranks(2)
def test_tensor_parallel_processes_are_dispatched_the_same_rows(rank: int) -> None:
    found = dispatched(drop_last=True, parallelism_config=ParallelismConfig(tp_size=2))
    assert found == ([[0, 1], [2, 3], [4, 5]], 3)


class Staged(Dataset[int]):
    """A data set that knows the epoch, as one whose augmentation follows a schedule."""

    epoch = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("skipped", [False, True])
def test_the_epoch_reaches_the_sampler_and_the_data_set(processes: int, skipped: bool) -> None:
    from accelerate import skip_first_batches
    from accelerate.data_loader import prepare_data_loader

    data = Staged()
    given = DataLoader(data, 2, shuffle=True)
    loader = prepare_data_loader(given, num_processes=processes, process_index=0, use_seedable_sampler=True)
    (skip_first_batches(loader, 1) if skipped else loader).set_epoch(5)
    assert (data.epoch, given.batch_sampler.sampler.epoch) == (5, 5)  # type: ignore[union-attr]


def test_a_loader_without_its_first_batches_repeats_as_many_samples_at_its_end() -> None:
    from accelerate import skip_first_batches
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(DataLoader(range(10), 3), num_processes=2, process_index=0)  # type: ignore[arg-type]
    skipped = skip_first_batches(loader, 1)
    assert [skipped.remainder for _ in skipped] == [4]
    assert skipped.total_batch_size == loader.total_batch_size == 6


@pytest.mark.ranks(2)
def test_a_dispatched_pass_goes_on_at_the_batch_behind_the_saved_one(rank: int) -> None:
    accelerator = CompatAccelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=True)
    )
    first, second = (accelerator.prepare(DataLoader(range(12), 2)) for _ in range(2))  # type: ignore[arg-type]
    assert next(iter(first)).tolist() == [[0, 1], [2, 3]][rank]
    second.load_state_dict(first.state_dict())
    assert [one.tolist() for one in second] == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]][rank]
    SharedAcceleratorState._reset_state(reset_partial_state=True)
