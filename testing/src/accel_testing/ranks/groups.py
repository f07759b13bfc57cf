"""Process group of a job on a rank: opened, closed, and removed from torch's caches."""

import gc
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from accel_testing.private import drop_mesh_caches
from accel_testing.ranks.wire import Job

if TYPE_CHECKING:
    from accel_state import Session


def enter_group(job: Job) -> "Session | None":
    """Opens the job's default group, if it has one, through a session, as a user's script does.

    The ranks meet at the job's own store, and the watchdog is on. For one rank without a session, torch opens the
    group.

    Collective: every rank of the group must call this.
    """
    if job.backend is None:
        return None
    # Longer than the test may take, because the pool reports a hang with stacks, and a collective's timeout does not.
    timeout = timedelta(seconds=2 * job.timeout + 60)
    if job.world_size == 1:
        import torch.distributed as dist

        dist.init_process_group(
            job.backend, rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{job.port}", timeout=timeout
        )
        return None
    from accel_state import Session

    return Session.open(cpu=job.backend == "gloo", backend=job.backend, timeout=timeout)


def leave_group(*, patience: float | None = None) -> None:
    """Closes all sessions of this process, as the end of a script does, and any group that is open without a session.

    The watchdogs of the other ranks see that this rank has left, so that no rank waits for it. ``patience``: seconds
    that closing may wait for the other ranks (None: without limit).
    """
    import torch.distributed as dist

    from accel_state.process_group.reference_count import open_sessions

    for session in open_sessions():
        session.close(patience=patience)
    if dist.is_initialized():
        dist.destroy_process_group()


def forget_groups() -> None:
    """Drops groups that were left, which stay alive as long as they are referenced.

    Each gloo group has a thread that wakes a hundred times a second, so a hundred groups load a machine fully. torch
    caches sharding decisions and redistribution plans of DTensors by their meshes, which reference groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        drop_mesh_caches()
    gc.collect()
