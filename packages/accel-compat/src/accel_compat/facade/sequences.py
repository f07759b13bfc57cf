"""Sequence parallelism of DeepSpeed as Accelerate offers it: loaders that split sequences, and the group of ranks."""

from typing import Any

from accel_compat.private import publish_sequence_group


def split_sequences(accelerator: Any, loader: Any) -> Any:
    """Returns DeepSpeed's adapter of a prepared loader, or the loader without sequence parallelism.

    The ranks of a sequence-parallel group read batches of their own. For each of these batches in turn, the adapter
    yields this rank's part of the sequences, with ``shift_labels`` in place of ``labels``.

    Collective: every rank of the group must call this.
    """
    group = accelerator._backend.layout.sequence_group
    if group is None:
        return loader
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    publish_sequence_group(group)
    return UlyssesSPDataLoaderAdapter(
        loader, sp_rank=group.rank(), sp_group=group, sp_world_size=group.size(), device=accelerator.device
    )
