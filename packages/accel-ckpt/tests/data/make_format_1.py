"""Wrote ``format_1`` beside this file, once, with accel-ckpt 0.1.0 on two ranks. Kept to show what it holds.

A later format gets a script and a folder of its own; those of format 1 stay and stay readable.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def content(rank: int = 0, whole: bool = True) -> dict[str, Any]:
    """The state of one rank; ``whole`` with plain tensors where the checkpoint has sharded ones."""
    weight = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    column = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    if not whole:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(weight, mesh, [Shard(0)])
        column = distribute_tensor(column, mesh, [Shard(1)])
    tied = torch.tensor([1.5, -2.5])
    return {
        "model": {"weight": weight, "column": column, "tied": tied, "head": tied, "scalar": torch.tensor(7)},
        "dtypes": {
            "f8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
            "c128": torch.tensor([1 + 2j], dtype=torch.complex128),
            "mask": torch.tensor([True, False]),
            "empty": torch.empty(0, 4, dtype=torch.int16),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "values": {"nan": float("nan"), "inf": float("-inf"), "big": 2**80, "$": None, "a/b": [True, "ä", -0.0]},
    }


def save(rank: int, folder: str, store: str) -> None:
    import torch.distributed as dist

    import accel_ckpt

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    own = {"rng": {"state": torch.tensor([rank, 2], dtype=torch.uint8), "rank": rank}}
    accel_ckpt.save(folder, content(rank, whole=False), local=own, metadata={"epoch": 3, "loss": 0.25})
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(__file__).parent / "format_1"
    if target.exists():
        sys.exit(f"{target} exists; it is never written again")
    with tempfile.TemporaryDirectory() as temporary:
        torch.multiprocessing.spawn(save, (str(target), f"{temporary}/store"), nprocs=2)
