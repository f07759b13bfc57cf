"""``load_state`` reads folders that a real Accelerate wrote, as they are; ``data/make_folders.py`` wrote them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_testing.ranks.pool import RankPool

DATA = Path(__file__).parent / "data"
FSDP = ("1.15.0-fsdp-full", "1.15.0-fsdp-sharded")
PLAIN = sorted(path.name for path in DATA.iterdir() if path.name[0].isdigit() and path.name not in FSDP)


def loaded(folder: Path, *, scheduled: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """What a script of Accelerate holds after ``load_state``, by the names of the saved run."""
    sys.path.insert(0, str(DATA))
    from accelerate import Accelerator
    from make_folders import Progress, build

    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = build()
    for one in model.parameters():
        torch.nn.init.constant_(one, 9.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)] if scheduled else []
    model, optimizer, *schedulers = accelerator.prepare(model, optimizer, *schedulers)
    progress = Progress()
    progress.best = 0.0
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state(str(folder))
    assert progress.best == 0.25
    found = {"draw": torch.rand(4)}
    if schedulers:
        found["lr"] = torch.tensor(schedulers[0].get_last_lr())
    names = dict(accelerator.unwrap_model(model).named_parameters())
    inner = optimizer.optimizer.state
    found |= {f"model/{name}": full(one) for name, one in names.items()}
    held = {name: inner[one] for name, one in names.items() if one in inner}
    return found | {f"{key}/{name}": full(one[key]) for name, one in held.items() for key in ("exp_avg", "exp_avg_sq")}


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(found: dict[str, torch.Tensor], folder: Path, rank: int) -> None:
    held = load_file(folder / f"held_{rank}.safetensors")
    assert held.keys() - found.keys() <= {"lr"}
    for name, value in found.items():
        assert torch.equal(held[name], value), name


@pytest.mark.parametrize("name", PLAIN)
def test_a_folder_of_accelerate_is_loaded(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / name, tmp_path / name)
    check(loaded(folder), folder, 0)


def loaded_by_fsdp(folder: Path) -> dict[str, torch.Tensor]:
    from accel_compat import install, uninstall
    from accel_compat.state.accelerator_state import SharedAcceleratorState

    install()
    try:
        from accelerate import FullyShardedDataParallelPlugin

        is_full = folder.name.endswith("full")
        kind = "FULL_STATE_DICT" if is_full else "SHARDED_STATE_DICT"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        # The optimizer whose shards were written had no scheduler, which adds an option to its groups.
        return loaded(folder, scheduled=is_full, fsdp_plugin=plugin)
    finally:
        SharedAcceleratorState._reset_state(reset_partial_state=True)
        uninstall()


@pytest.mark.parametrize("name", FSDP)
def test_a_folder_of_accelerates_fsdp_is_loaded_by_fsdp(name: str, tmp_path: Path, rank_pool: RankPool) -> None:
    folder = shutil.copytree(DATA / name, tmp_path / name)
    for rank, found in enumerate(rank_pool.run(loaded_by_fsdp, folder, ranks=2)):
        check(found, folder, rank)
