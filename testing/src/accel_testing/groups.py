"""The process group of a job on a rank: opened, left, and forgotten by what torch remembers of it."""

import gc
import sys
from contextlib import suppress
from datetime import timedelta

from accel_testing.wire import Job


def enter_group(job: Job) -> None:
    """Opens the default group that a job wants, if any; collective."""
    if job.backend is None:
        return
    import torch.distributed as dist

    # Longer than the test may take: a hang is reported by the pool, with stacks, not by one collective's timeout.
    dist.init_process_group(
        job.backend,
        init_method=job.init_method,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=2 * job.timeout + 60),
    )
    # A rank that fails at once would be gone while another still connects to it, which would wait for ever.
    dist.barrier()


def leave_group() -> None:
    """Leaves all groups that are open."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def forget_groups() -> None:
    """Lets go of groups that were left, which live on as long as anything refers to them.

    Each of gloo's has a thread that wakes a hundred times a second: of a hundred of them a machine does little else.
    What torch has worked out about DTensors (how an operation spreads them, in which steps they are spread anew) is
    kept by their meshes, which hold groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        # Names within torch, which come and go: one that is missing leaves some threads behind, and nothing breaks.
        for owner, name in (
            (debug, "_clear_sharding_prop_cache"),
            (_redistribute, "clear_redistribute_planner_cache"),
            (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
            (getattr(_collective_utils.MeshTopoInfo, "build_from_mesh", None), "cache_clear"),
        ):
            with suppress(AttributeError):
                getattr(owner, name)()
    gc.collect()
