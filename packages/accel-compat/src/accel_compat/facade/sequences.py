"""Sequence parallelism of DeepSpeed as Accelerate offers it: loaders that split sequences, and the group of ranks."""

from typing import TYPE_CHECKING, Any

from accel_compat.private import publish_sequence_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def split_sequences(loader: Any, group: "ProcessGroup | None", device: "torch.device") -> Any:
    """Returns DeepSpeed's adapter of a prepared loader, or the loader itself if ``group`` is None.

    The ranks of a sequence-parallel group read batches of their own. For each of these batches in turn, the adapter
    yields this rank's part of the sequences on ``device``, with ``shift_labels`` in place of ``labels``.

    Collective: every rank of the group must call this.
    """
    if group is None:
        return loader
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    publish_sequence_group(group)
    return UlyssesSPDataLoaderAdapter(
        loader, sp_rank=group.rank(), sp_group=group, sp_world_size=group.size(), device=device
    )
