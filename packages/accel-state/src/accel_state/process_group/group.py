"""Process groups of torch.distributed: opening, backend, timeout, sibling groups, closing."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from accel_state.collectives.group_argument import GLOO_SETTLES, is_fake
from accel_state.device.device import Device
from accel_state.environment import available_cpus, parse_flag
from accel_state.errors import SessionError
from accel_state.private import backends_by_device, new_group, timeout_of
from accel_state.process_group.torch_log import no_warnings
from accel_state.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
# Longest wait for the other ranks at the rendezvous, whatever the timeout of collectives.
_LONGEST_RENDEZVOUS = timedelta(minutes=10)


def default_group() -> "ProcessGroup | None":
    """Returns torch's default process group, or None if there is none (or this torch has no torch.distributed)."""
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
    """Opens the default group for ``topology``: sets the device, meets the other ranks at the rendezvous, calls torch.

    Collective: every rank of the group must call this.

    Raises:
        SessionError: within the timeout (10 minutes at most), with the address and the missing ranks or the cause.
    """
    import torch.distributed as dist

    from accel_state.process_group.rendezvous import connect, describe

    if not dist.is_available():
        raise SessionError(f"{topology} needs torch.distributed, which this build of torch lacks")
    patience = _LONGEST_RENDEZVOUS if timeout is None else min(timeout, _LONGEST_RENDEZVOUS)
    prepare_process(topology, device, env)
    backend = choose_backend(device, backend)
    timeout = _own_timeout(backend) if timeout is None else timeout
    store = connect(topology, init_method=init_method, timeout=patience, env=env)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timeout,
            device_id=device.torch if device.kind.bound and device.index is not None else None,
        )
        if backend == "gloo":
            # If a rank ended at once, its listening socket would close while other ranks still connect to it.
            dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise SessionError(
            f"rank {topology.rank} of {topology.world_size} met the others at {describe(topology, init_method)}, but "
            f"{backend!r} could not connect {device}: {error}"
        ) from error
    group = default_group()
    assert group is not None
    return group


def _own_timeout(backend: str) -> timedelta | None:
    """Returns NCCL's timeout for a backend with NCCL, to which torch gives gloo's; otherwise None: torch's own."""
    if "nccl" not in backend:
        return None
    from torch.distributed import constants

    found = constants.default_pg_nccl_timeout
    return timedelta(minutes=10) if found is None else found


def prepare_process(topology: Topology, device: Device, env: Mapping[str, str]) -> None:
    """Prepares this process for a collective backend: current device, number of CPU threads, peer-to-peer check.

    Without ``OMP_NUM_THREADS`` each process of a node would start a thread per core, so that they slow each other down.

    Raises:
        SessionError: NCCL would fail or hang on these GPUs with this driver.
    """
    device.load_collectives()
    device.set_current()
    if parse_flag(env, "ACCELERATE_CPU_AFFINITY"):
        device.keep_to_near_cores()
    if device.type == "cpu" and topology.local_world_size > 1 and not env.get("OMP_NUM_THREADS"):
        share = max(1, available_cpus() // topology.local_world_size)
        torch.set_num_threads(min(share, torch.get_num_threads()))
    device.check_connections(env)


def choose_backend(device: Device, asked: str | None) -> str:
    """Returns the backend for ``device``: ``asked`` if it supports the device; without ``asked`` the device's own.

    Raises:
        SessionError: torch does not have the backend ``asked``, or that backend does not support this device.
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
    """Raises if the group that is already open has another backend than ``asked``; a fake group stands for any.

    Raises:
        SessionError: naming both backends.
    """
    if asked is None or is_fake(group):
        return
    have = group_backend(group)
    parts = {part.rpartition(":")[2] for part in have.split(",")}
    if {part.rpartition(":")[2] for part in asked.lower().split(",")} - parts:
        raise SessionError(f"backend={asked!r} asked for, but the process group is already open with {have!r}")


def group_backend(group: "ProcessGroup") -> str:
    """Returns the backend's name, with the device types if there are several ("cpu:gloo,cuda:nccl")."""
    import torch.distributed as dist

    return str(dist.get_backend_config(group)) if len(_backends(group)) > 1 else str(dist.get_backend(group))


def sends_from_host(group: "ProcessGroup | None") -> bool:
    """Whether a group sends CPU tensors; None: torch's default group."""
    import torch.distributed as dist

    return "cpu:" in str(dist.get_backend_config(group))


def read_timeout(group: "ProcessGroup") -> timedelta | None:
    """Returns the timeout of collectives of ``group``: the shortest of its backends; None if no backend exposes it."""
    told = (timeout_of(backend) for backend in _backends(group))
    return min((value for value in told if isinstance(value, timedelta)), default=None)


def set_default_timeout(timeout: timedelta | None) -> None:
    """Sets the timeout of groups created from now on without a timeout; None restores torch's own defaults.

    Libraries and device meshes create such groups without a way to pass a timeout.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import constants, distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, getattr(constants, name) if timeout is None else timeout)


def sibling_group(
    like: "ProcessGroup",
    *,
    ranks: Sequence[int] | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> "ProcessGroup":
    """Creates another group of the ranks of ``like``, or of some of them.

    Collective: every rank of the group must call this. Ranks outside ``like`` must not.

    torch derives the name of a new group from the groups that this process created before. Ranks that created other
    groups would therefore wait for one another under different names, and the name of a destroyed group would be reused
    while its addresses are still in the store. The first rank of ``like`` therefore draws a random name and broadcasts
    it. torch does not count the group, so that later ``new_group`` calls meet whether a rank is in it or not.

    Args:
        ranks: ranks of the new group, as ``like`` numbers them; None: all. Other ranks get torch's
            ``GroupMember.NON_GROUP_MEMBER``.
        backend: backend of the new group; None: that of ``like``. The siblings of a fake group are fake.
        timeout: timeout of its collectives; None: torch's default.
    """
    import torch.distributed as dist

    from accel_state.collectives.objects import all_gather_object

    within = range(like.size()) if ranks is None else ranks
    chosen = dist.Backend(group_backend(like) if backend is None or is_fake(like) else backend)
    name: Any = f"accel/{all_gather_object(uuid4().hex, group=like)[0]}"
    if like.rank() not in within:
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        return outside  # type: ignore[no-any-return]
    numbers = dist.get_process_group_ranks(like)
    with no_warnings():  # of the store, if rank 0 ends before it has set its address
        return new_group([numbers[one] for one in within], within.index(like.rank()), chosen, name, timeout)


def close_group(group: "ProcessGroup", *, patience: float | None = None) -> None:
    """Destroys ``group``; with ``patience`` (seconds) it returns after that time even if a peer is gone."""
    if "gloo" in group_backend(group):
        time.sleep(GLOO_SETTLES)
    if patience is None:
        _destroy(group)
        return
    worker = threading.Thread(target=_destroy, args=(group,), name="accel-close-group", daemon=True)
    try:
        worker.start()
    except RuntimeError:  # Python 3.12 starts no threads while the interpreter shuts down
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
    found: dict[int, object] = {id(backend): backend for backend in backends_by_device(group)}
    return list(found.values())
