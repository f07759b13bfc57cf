"""Preparation of a user's DataLoader: the front door of this package.

The road of a loader: ``LoaderSpec.of`` makes every decision that needs no other rank, ``open_source`` opens the source
that the specification asks for, and ``PreparedLoader`` reads from that source.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from accel_data.device.prefetch import AsIs, placer_for
from accel_data.failure_relay import alarm
from accel_data.loader import PreparedLoader
from accel_data.loader_spec import LoaderSpec, open_source
from accel_data.map.samplers import SkipBatchSampler
from accel_data.observer import LoaderObserver
from accel_data.options import LoaderOptions
from accel_data.stateful_dataloader import require_torchdata
from accel_data.workers import delivering_in_order
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_data.device.sequence_parallel import Part

_SAME_SAMPLES = ("pp", "cp", "sp", "tp")
"""Axes of a mesh along which ranks compute on the same samples."""


def prepare_loader(
    dataloader: "DataLoader[Any] | PreparedLoader",
    shard: DataShard,
    *,
    device: torch.device | None = None,
    options: LoaderOptions | None = None,
    observer: LoaderObserver | None = None,
    session_group: "ProcessGroup | None" = None,
    slice_fn: Callable[..., Any] | None = None,
    part: "Part | None" = None,
) -> PreparedLoader:
    """Prepares a loader for this rank's shard ``shard`` of the data of ``dataloader``, with all its options kept.

    ``device`` is the target of batches (None: they are not moved). ``slice_fn`` slices a dispatched batch. ``part``
    takes this rank's sequence shard of each batch, if other ranks read the same batches (see
    ``device.sequence_parallel``). ``dataloader`` itself is not changed; a prepared loader is returned as it is.

    Collective: every rank of the group must call this. That holds for map-style data; ``session_group`` defaults to the
    default group, if one is open. The ranks compare the lengths of their datasets and take rank 0's seed. Without a
    group each rank draws its own seed, so that several ranks need ``data_seed``.

    Raises:
        ConfigError: the DataLoader does not support the options; names those that work.
        DataError: the ranks' datasets have different lengths.
        ImportError: ``use_stateful_dataloader`` without torchdata.
    """
    if type(dataloader) is PreparedLoader:
        return dataloader
    assert not isinstance(dataloader, PreparedLoader)
    options = LoaderOptions() if options is None else options
    if options.use_stateful_dataloader:
        require_torchdata()
    ordered, on_device = delivering_in_order(dataloader), device is not None
    spec = LoaderSpec.of(ordered, shard, options, on_device=on_device, group=session_group, slice_fn=slice_fn)
    source = open_source(spec)
    placer = None
    # Without an accelerator in this process all tensors are on the CPU.
    if device is not None and (device.type != "cpu" or torch.accelerator.is_available()):
        placer = placer_for(
            device,
            non_blocking=options.non_blocking,
            even_batches=options.even_batches,
            reused=dataloader.num_workers == 0,  # the batches of worker processes have memory of their own
        )
    if part is not None:
        from accel_data.device.sequence_parallel import PartPlacer

        placer = PartPlacer(part, placer or AsIs())
    return PreparedLoader(source, options=options, placer=placer, observer=observer, alarm=alarm())


def prepare_data_loader(  # noqa: PLR0913 (the signature is a contract)
    dataloader: "DataLoader[Any]",
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[object] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: "DeviceMesh | None" = None,
) -> "DataLoader[Any]":
    """Calls ``prepare_loader`` with the parameter names of Accelerate.

    ``num_processes`` and ``process_index`` default to the open process group, or one process. ``rng_types`` is accepted
    and ignored: ranks agree on the order without synchronising generators.

    Raises:
        ConfigError: ``dispatch_batches`` without ``put_on_device``, or as in ``prepare_loader``.
    """
    if dispatch_batches and not put_on_device:
        raise ConfigError("dispatch_batches=True sends batches from device to device; it needs put_on_device=True")
    options = LoaderOptions(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    shard = _shard_of(num_processes, process_index, torch_device_mesh)
    target = (torch.device("cpu") if device is None else device) if put_on_device else None
    loader = prepare_loader(dataloader, shard, device=target, options=options, slice_fn=slice_fn_for_dispatch)
    return cast("DataLoader[Any]", loader)


def _shard_of(num_processes: int | None, process_index: int | None, mesh: "DeviceMesh | None") -> DataShard:
    from accel_state.collectives.group_argument import resolve

    group = resolve(None)
    count = (1 if group is None else group.size()) if num_processes is None else num_processes
    index = (0 if group is None else group.rank()) if process_index is None else process_index
    axes = [] if mesh is None else list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    shard, shards, peers = 0, 1, 1
    for name, size in reversed(axes):  # the last axis varies fastest with the rank
        index, place = divmod(index, size)
        if name in _SAME_SAMPLES:
            peers *= size
        else:
            shard, shards = shard + place * shards, shards * size
    return DataShard(shard + index * shards, count // peers)


def skip_first_batches(dataloader: "DataLoader[Any] | PreparedLoader", num_batches: int = 0) -> "DataLoader[Any]":
    """Returns a loader like ``dataloader`` whose next pass starts ``num_batches`` batches after the start of the epoch.

    A loader that this function has returned skips ``num_batches`` more. A prepared loader of map-style data seeks:
    nothing is read, however many batches are skipped, every option is kept, and later epochs are full. Both loaders
    share one position: after the pass, ``dataloader`` is in the next epoch, and its ``state_dict`` includes the batches
    of the pass. The two can therefore be iterated in turn, whether the position was restored or not. A plain DataLoader
    becomes a plain DataLoader that iterates over the skipped indices (or, for an iterable dataset, reads and drops the
    skipped batches).

    Raises:
        ValueError: ``num_batches`` is not an integer >= 0.
    """
    if type(dataloader) is PreparedLoader:
        return cast("DataLoader[Any]", dataloader.skipped(num_batches))
    from accel_data.map.skip import SkippedStream, swapped, whole_batches

    num_batches = whole_batches(num_batches)
    assert not isinstance(dataloader, PreparedLoader)
    if dataloader.batch_sampler is None or isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
        return cast("DataLoader[Any]", SkippedStream(dataloader, num_batches))
    return swapped(dataloader, SkipBatchSampler(dataloader.batch_sampler, num_batches))
