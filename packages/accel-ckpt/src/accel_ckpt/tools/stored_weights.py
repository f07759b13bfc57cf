"""Weights of a saved model, each read on its own: for programs that place them one by one."""

import os
from dataclasses import dataclass
from typing import final

import torch

from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.tools.export import stored_names


@final
@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Tensor of a checkpoint, which stays open as long as one of its weights exists."""

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Reads the full tensor onto the CPU, and verifies it.

        Raises:
            CheckpointCorruptError: a block does not match its digest.
        """
        return self.checkpoint.read_tensor(self.key)


def stored_weights(path: str | os.PathLike[str], *, state: str = "model") -> dict[str, StoredWeight]:
    """Maps the names of the tensors of the saved ``state`` to them; reads JSON only. Names that are tied share a key.

    Raises:
        CheckpointError: there is no such checkpoint or state.
        CheckpointCorruptError: the manifest is damaged.
    """
    saved = open_checkpoint(path, verify=False)
    return {
        name: StoredWeight(saved, key, tuple(saved.manifest.tensors[key].shape), saved.dtype_of(key))
        for name, key in stored_names(saved, state).items()
    }
