"""From a user's DataLoader to this rank's."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from accel_data.device.prefetch import AsIs, placer_for
from accel_data.failure_relay import alarm
from accel_data.loader import PreparedLoader
from accel_data.map.samplers import SkipBatchSampler
from accel_data.observer import LoaderObserver
from accel_data.options import LoaderOptions
from accel_data.select_source import Placement, select_source
from accel_data.stateful_dataloader import require_torchdata
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_data.device.sequence_parallel import Part

_SAME_SAMPLES = ("pp", "cp", "sp", "tp")
"""Axes of a mesh along which ranks work on one sample together."""


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
    """A loader of this rank's share ``shard`` of what ``dataloader`` reads, with all its options kept.

    ``device`` is where batches are moved (None: they stay where they are). ``slice_fn`` cuts a dispatched batch.
    ``part`` takes of each batch what this rank computes on, where others read the same (see ``sequences``).
    ``dataloader`` itself is not changed; a loader that is prepared already is returned as it is.

    For map-style data a collective of ``session_group`` (None: the default group, when one is open): the ranks compare
    the lengths of their datasets and take rank 0's seed. Without a group each rank draws its own, so that several
    ranks need ``data_seed`` then.

    Raises:
        ConfigError: the options cannot be had with this DataLoader; says which can.
        DataError: the ranks were given datasets of different lengths.
        ImportError: ``use_stateful_dataloader`` without torchdata.
    """
    if type(dataloader) is PreparedLoader:
        return dataloader
    assert not isinstance(dataloader, PreparedLoader)
    options = LoaderOptions() if options is None else options
    if options.use_stateful_dataloader:
        require_torchdata()
    placement = Placement(shard=shard, on_device=device is not None, group=session_group, slice_fn=slice_fn)
    source = select_source(dataloader, options, placement)
    # Without any accelerator in this process no tensor can be elsewhere than on the CPU.
    moves = device is not None and (device.type != "cpu" or torch.accelerator.is_available())
    placer = None
    if moves:
        placer = placer_for(device, non_blocking=options.non_blocking, even_batches=options.even_batches)
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
    """``prepare_loader`` with the names that users of other libraries know.

    ``num_processes`` and ``process_index`` default to the open process group, or one process. ``rng_types`` is
    accepted and not needed: ranks agree on the order without synchronising generators.

    Raises:
        ConfigError: ``dispatch_batches`` without ``put_on_device``, or what ``prepare_loader`` raises.
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
    for name, size in reversed(axes):  # ranks count through the last axis fastest
        index, place = divmod(index, size)
        if name in _SAME_SAMPLES:
            peers *= size
        else:
            shard, shards = shard + place * shards, shards * size
    return DataShard(shard + index * shards, count // peers)


def skip_first_batches(dataloader: "DataLoader[Any] | PreparedLoader", num_batches: int = 0) -> "DataLoader[Any]":
    """A loader like ``dataloader`` whose next pass starts ``num_batches`` batches after the begin of the epoch.

    A prepared loader of map-style data seeks: nothing is read, however many batches are skipped, and every option is
    kept; later epochs are whole. ``dataloader`` moves along: it is in the epoch after once the pass has ended, and
    says where the pass is when it is saved. So it may be iterated in turn with this, whether its own position has been
    restored or not. A plain DataLoader becomes a plain DataLoader that walks over the indices
    (or, for an iterable dataset, reads and forgets batches).
    """
    if type(dataloader) is PreparedLoader:
        return cast("DataLoader[Any]", dataloader.skipped(num_batches))
    from accel_data.map.skip import SkippedStream, swapped

    assert not isinstance(dataloader, PreparedLoader)
    if dataloader.batch_sampler is None or isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
        return cast("DataLoader[Any]", SkippedStream(dataloader, num_batches))
    return swapped(dataloader, SkipBatchSampler(dataloader.batch_sampler, num_batches))
