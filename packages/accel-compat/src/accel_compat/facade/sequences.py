"""Sequence parallelism of DeepSpeed as Accelerate offers it: loaders that split sequences."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def split_sequences(loader: Any, group: "ProcessGroup", device: "torch.device") -> Any:
    """Returns DeepSpeed's adapter of a prepared loader.

    The ranks of the sequence-parallel ``group`` read batches of their own and exchange them through ``device``. For each
    of these batches in turn, the adapter yields this rank's part of the sequences in host memory, with ``shift_labels``
    in place of ``labels``.

    Collective: every rank of the group must call this.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    return UlyssesSPDataLoaderAdapter(
        loader, sp_rank=group.rank(), sp_group=group, sp_world_size=group.size(), device=device
    )
