"""The process group of torch.distributed: opening, reading back, sharing and closing it."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from accel_state.collectives.group_argument import GLOO_SETTLES
from accel_state.device.device import Device
from accel_state.environment import parse_flag
from accel_state.errors import SessionError
from accel_state.process_group.torch_log import no_warnings
from accel_state.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
# How long we wait for others to come at most, however patient the collectives are told to be.
_LONGEST_RENDEZVOUS = timedelta(minutes=10)
# Types whose backend makes its communicator at once when told the device, and then reports a wrong one at once.
_BOUND_TYPES = frozenset({"cuda", "xpu"})


def default_group() -> "ProcessGroup | None":
    """torch's default process group, or None when there is none (or this torch has no torch.distributed)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def open_default_group(
    topology: Topology,
    device: Device,
    *,
    backend: str | None,
    timeout: timedelta | None,
    init_method: "str | Store | None",
    env: Mapping[str, str],
) -> "ProcessGroup":
    """Opens the default group for ``topology``: the device is set first, the peers are met, then torch is asked.

    Raises:
        SessionError: within the timeout (10 minutes at most), saying where, and for whom or what it waited.
    """
    import torch.distributed as dist

    from accel_state.process_group.rendezvous import connect, describe

    if not dist.is_available():
        raise SessionError(f"{topology} needs torch.distributed, which this build of torch lacks")
    patience = _LONGEST_RENDEZVOUS if timeout is None else min(timeout, _LONGEST_RENDEZVOUS)
    prepare_process(topology, device, env)
    backend = choose_backend(device, backend)
    store = connect(topology, init_method=init_method, timeout=patience, env=env)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timeout,
            device_id=device.torch if device.type in _BOUND_TYPES and device.index is not None else None,
        )
        if backend == "gloo":
            # A rank that left at once would take its listening socket along while others still connect to it.
            dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise SessionError(
            f"rank {topology.rank} of {topology.world_size} met the others at {describe(topology, init_method)}, but "
            f"{backend!r} could not connect {device}: {error}"
        ) from error
    group = default_group()
    assert group is not None
    return group


def prepare_process(topology: Topology, device: Device, env: Mapping[str, str]) -> None:
    """What must be so before a backend starts: the current device, CPU threads shared fairly, cards that can talk.

    Without ``OMP_NUM_THREADS`` the processes of a node would each start a thread per core and slow each other down.

    Raises:
        SessionError: NCCL would fail or hang on these cards with this driver.
    """
    device.load_collectives()
    device.set_current()
    if parse_flag(env, "ACCELERATE_CPU_AFFINITY"):
        from accel_state.device.gpus import set_numa_affinity

        set_numa_affinity(topology.local_rank)
    if device.type == "cpu" and topology.local_world_size > 1 and not env.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // topology.local_world_size)
        torch.set_num_threads(min(share, torch.get_num_threads()))
    detours = env.get("NCCL_P2P_DISABLE") and env.get("NCCL_IB_DISABLE")
    if device.type == "cuda" and not detours and "RTX 40" in torch.cuda.get_device_name(device.torch):
        from accel_state.device.gpus import check_cuda_p2p_ib_support

        if not check_cuda_p2p_ib_support():
            raise SessionError(
                "GPUs of the RTX 40 series cannot talk to each other directly under this driver; set NCCL_P2P_DISABLE=1"
                " and NCCL_IB_DISABLE=1, or install driver 550.40.07 or newer"
            )


def choose_backend(device: Device, asked: str | None) -> str:
    """The backend for ``device``: the one ``asked`` for when it can serve it, else the device's own.

    Raises:
        SessionError: torch does not know ``asked``, or it cannot move tensors of this device.
    """
    if asked is None:
        return device.collective_backend
    import torch.distributed as dist

    known = dist.Backend.backend_capability
    wanted = asked.lower()
    pairs = [part.partition(":") for part in wanted.split(",")]
    names = {name or head for head, _, name in pairs}
    unknown = sorted(names - set(known))
    if unknown:
        raise SessionError(f"backend={asked!r} is unknown to torch; known: {', '.join(sorted(known))}")
    serves = {head for head, _, name in pairs if name} | {
        type_ for head, _, name in pairs if not name for type_ in known[head]
    }
    if device.type not in serves and device.collective_backend != wanted:
        raise SessionError(
            f"backend={asked!r} does not serve {device}; use {device.collective_backend!r} or leave it out"
        )
    return wanted


def check_adopted_backend(group: "ProcessGroup", asked: str | None) -> None:
    """Refuses ``asked`` when the group that is already open was made with another backend.

    Raises:
        SessionError: naming both.
    """
    if asked is None:
        return
    have = group_backend(group)
    parts = {part.rpartition(":")[2] for part in have.split(",")}
    if {part.rpartition(":")[2] for part in asked.lower().split(",")} - parts:
        raise SessionError(f"backend={asked!r} asked for, but the process group is already open with {have!r}")


def group_backend(group: "ProcessGroup") -> str:
    """The backend's name, as given or with both halves ("cpu:gloo,cuda:nccl")."""
    import torch.distributed as dist

    return str(dist.get_backend_config(group)) if len(_backends(group)) > 1 else str(dist.get_backend(group))


def read_timeout(group: "ProcessGroup") -> timedelta | None:
    """How long collectives of ``group`` really wait: the shortest of its backends; None when none of them tells."""
    told = (getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group))
    return min((value for value in told if isinstance(value, timedelta)), default=None)


def set_default_timeout(timeout: timedelta | None) -> None:
    """Sets the timeout of groups that are made from now on without one; None restores torch's own defaults.

    Libraries and device meshes make such groups, and take no timeout.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import constants, distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, getattr(constants, name) if timeout is None else timeout)


def sibling_group(
    like: "ProcessGroup", *, backend: str | None = None, timeout: timedelta | None = None
) -> "ProcessGroup":
    """Another group of the ranks of ``like``. Collective over ``like``, and over no other rank.

    torch derives the name of a new group from the groups that this process made before. Ranks that made groups of their
    own would wait for one another under different names, and the name of a destroyed group would be used again while
    its addresses are still in the store. The name of this group is therefore drawn by the first rank of ``like``.

    Args:
        backend: the name of its backend; None: that of ``like``.
        timeout: how long its collectives wait; None: as long as torch's default.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from accel_state.collectives.objects import all_gather_object

    ranks = dist.get_process_group_ranks(like)
    chosen = dist.Backend(group_backend(like) if backend is None else backend)
    name: Any = f"accel/{all_gather_object(uuid4().hex, group=like)[0]}"
    group: ProcessGroup
    with no_warnings():  # of the store, where rank 0 ends before it has given its address
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            like.rank(),
            ranks,
            chosen,
            c10d._get_default_store(),
            name,
            timeout=c10d._get_default_timeout(chosen) if timeout is None else timeout,
            device_id=c10d._get_default_group().bound_device_id,
        )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def close_group(group: "ProcessGroup", *, patience: float | None = None) -> None:
    """Destroys ``group``; with ``patience`` (seconds) it gives up rather than hang on a peer that is gone."""
    if "gloo" in group_backend(group):
        time.sleep(GLOO_SETTLES)
    if patience is None:
        _destroy(group)
        return
    worker = threading.Thread(target=_destroy, args=(group,), name="accel-close-group", daemon=True)
    try:
        worker.start()
    except RuntimeError:  # Python 3.12 starts no threads once the interpreter is on its way out
        if group_backend(group) == "gloo":
            _destroy(group)
        return
    worker.join(patience)
    if worker.is_alive():
        _LOG.warning("the process group did not close within %g s; leaving it to the operating system", patience)


def _destroy(group: "ProcessGroup") -> None:
    import torch.distributed as dist

    dist.destroy_process_group(None if group is default_group() else group)


def _backends(group: "ProcessGroup") -> list[object]:
    found: dict[int, object] = {}
    for device in group._device_types:
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        found[id(backend)] = backend
    return list(found.values())
