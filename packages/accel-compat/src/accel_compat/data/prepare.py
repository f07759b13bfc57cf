"""Preparation of loaders: which loader class, sampler and dataset deliver a process's shard."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_compat.data.iterable import CompatIterableShard
from accel_compat.data.loaders import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader, mesh_ranks
from accel_compat.data.samplers import CompatBatchShard, CompatSkipSampler, set_sampler
from accel_compat.private import sampler_length
from accel_compat.state.process_state import SharedPartialState
from accel_data import SeedableRandomSampler, get_sampler

# Arguments of DataLoader that a new loader takes over, with their defaults.
_CARRIED = {
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}


def carried(dataloader: Any) -> dict[str, Any]:
    """Returns the arguments of a loader that a new loader takes over."""
    return {name: getattr(dataloader, name, default) for name, default in _CARRIED.items()}


def prepare_data_loader(  # noqa: PLR0913  (the signature that users know)
    dataloader: Any,
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> Any:
    """Returns a loader that delivers this process's batches.

    Raises:
        ValueError: options that contradict each other or the loader.
    """
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError("Using `dispatch_batches=True` requires `put_on_device=True`.")
    state = SharedPartialState()
    num_processes = state.num_processes if num_processes is None else num_processes
    process_index = state.process_index if process_index is None else process_index
    if torch_device_mesh is not None:
        num_processes, process_index = mesh_ranks(torch_device_mesh)
    if split_batches:
        _check_divisible(dataloader, num_processes)
    batched_by_sampler = isinstance(dataloader.sampler, BatchSampler)
    readers = 1 if dispatch_batches else num_processes
    generator = _seed_order(dataloader, readers, seedable=use_seedable_sampler, seed=data_seed)
    dataset, sampler = dataloader.dataset, dataloader.sampler if batched_by_sampler else dataloader.batch_sampler
    if num_processes != 1 and not dispatch_batches:
        if isinstance(dataset, IterableDataset):
            generator = getattr(dataset, "generator", None)
            dataset = _sharded(dataloader, num_processes, process_index, split_batches=split_batches)
            sampler = None
        else:
            sampler = CompatBatchShard(sampler, num_processes, process_index, split_batches, even_batches)
    elif isinstance(dataset, IterableDataset):
        sampler = None
    if rng_types is not None and generator is None:
        rng_types = [kind for kind in rng_types if str(kind) != "generator"]
    kwargs = carried(dataloader) | _batching(dataloader, dataset, sampler, by_sampler=batched_by_sampler)
    if isinstance(dataset, CompatIterableShard) and not dispatch_batches and dataloader.batch_size is not None:
        parts = num_processes if split_batches else 1
        kwargs["batch_size"] = dataloader.batch_size // parts
    elif (
        _is_shardable(dataloader.dataset, num_processes)
        and split_batches
        and "batch_size" in kwargs
        and not dispatch_batches
    ):
        kwargs["batch_size"] = dataloader.batch_size // num_processes
    common = {
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
        "use_stateful_dataloader": use_stateful_dataloader,
        "torch_device_mesh": torch_device_mesh,
    }
    if dispatch_batches:
        kwargs.pop("generator")
        return DataLoaderDispatcher(
            dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **common, **kwargs
        )
    return DataLoaderShard(
        dataset,
        device=device if put_on_device else None,
        rng_types=rng_types,
        synchronized_generator=generator,
        **common,
        **kwargs,
    )


def _check_divisible(dataloader: Any, num_processes: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(dataloader.batch_sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "In order to use `split_batches==True` you must have a `batch_size` attribute either in the passed "
            "`dataloader` or `dataloader.batch_sampler` objects, and it has to return a natural number. Your "
            "`dataloader.batch_size` is None and `dataloader.batch_sampler` has no `batch_size` attribute."
        )
    if size % num_processes != 0:
        raise ValueError(
            f"To use a `DataLoader` in `split_batches` mode, the batch size ({size}) needs to be a round multiple of "
            f"the number of processes ({num_processes})."
        )


def _seed_order(dataloader: Any, readers: int, *, seedable: bool, seed: int | None) -> Any:
    """Makes the order alike on all processes that read, and returns the generator that decides it, if there is one."""
    if isinstance(dataloader.dataset, IterableDataset):
        return getattr(dataloader.dataset, "generator", None) if readers != 1 else None
    sampler = get_sampler(dataloader)
    if isinstance(sampler, RandomSampler) and seedable:
        sampler = SeedableRandomSampler(
            data_source=sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler_length(sampler),
            generator=getattr(sampler, "generator", torch.Generator(device=torch.get_default_device())),
            data_seed=seed,
        )
        set_sampler(dataloader, sampler)
    if readers == 1 or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator


def _is_shardable(dataset: Any, num_processes: int) -> bool:
    return (
        isinstance(dataset, IterableDataset)
        and callable(getattr(dataset, "shard", None))
        and getattr(dataset, "n_shards", 0) >= num_processes
        and num_processes > 1
    )


def _sharded(dataloader: Any, num_processes: int, process_index: int, *, split_batches: bool) -> Any:
    dataset = dataloader.dataset
    if _is_shardable(dataset, num_processes) and not split_batches:
        return dataset.shard(num_shards=num_processes, index=process_index)
    return CompatIterableShard(
        dataset,
        batch_size=dataloader.batch_size if dataloader.batch_size is not None else 1,
        drop_last=dataloader.drop_last,
        num_processes=num_processes,
        process_index=process_index,
        split_batches=split_batches,
    )


def _batching(dataloader: Any, dataset: Any, sampler: Any, *, by_sampler: bool) -> dict[str, Any]:
    """Arguments with which a new loader makes its batches."""
    if isinstance(dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if by_sampler:
        return {"sampler": sampler, "batch_size": None, "batch_sampler": None}
    if sampler is None:
        return {"sampler": dataloader.sampler, "batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    return {"batch_sampler": sampler}


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Returns a loader like ``dataloader`` whose pass begins after ``num_batches`` batches."""
    dataset, kind = dataloader.dataset, type(dataloader)
    iterable = isinstance(dataset, IterableDataset)
    by_sampler = isinstance(dataloader.sampler, BatchSampler)
    sampler = None
    if not iterable and (by_sampler or dataloader.batch_sampler is not None):
        sampler = CompatSkipSampler(dataloader.sampler if by_sampler else dataloader.batch_sampler, num_batches)
    kwargs = carried(dataloader) | _batching(dataloader, dataset, sampler, by_sampler=by_sampler)
    stateful = {"use_stateful_dataloader": getattr(dataloader, "use_stateful_dataloader", False)}
    if kind is DataLoaderDispatcher or kind is DataLoaderShard:
        kwargs |= {
            name: getattr(dataloader, name)
            for name in ("iteration", "_drop_last", "_non_blocking", "torch_device_mesh")
        }
        kwargs["skip_batches"] = num_batches if sampler is None else 0
    if kind is DataLoaderDispatcher:
        kwargs.pop("generator")
        return DataLoaderDispatcher(
            dataset, split_batches=dataloader.split_batches, slice_fn=dataloader.slice_fn, **stateful, **kwargs
        )
    if kind is DataLoaderShard:
        return DataLoaderShard(
            dataset,
            device=dataloader.device,
            rng_types=dataloader.rng_types,
            synchronized_generator=dataloader.synchronized_generator,
            **stateful,
            **kwargs,
        )
    if sampler is None:
        return SkipDataLoader(dataset, skip_batches=num_batches, **stateful, **kwargs)
    return DataLoader(dataset, **kwargs)
