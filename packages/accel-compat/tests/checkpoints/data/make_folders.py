"""Writes the folders beside this script with a real Accelerate, and what its run held.

    python make_folders.py OUT LAYOUT      # LAYOUT: single, bin, ddp, fsdp-full, fsdp-sharded

Under several processes: torchrun --nproc-per-node 2 make_folders.py OUT ddp, with ACCELERATE_USE_CPU=true. FSDP takes
the functions of Accelerate that write its files, because Accelerate does not shard on CPUs.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file


class Network(torch.nn.Module):
    """Two layers of one shape, a norm with buffers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(3, 3)
        self.first = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.frozen = torch.nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.first(self.second(x).relu())))


class Progress:
    """A registered object."""

    best = 0.25

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Network()
    decayed = [one for one in model.parameters() if one.dim() > 1 and one.requires_grad]
    other = [one for one in model.parameters() if one.dim() == 1 and one.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05)


def build_model() -> torch.nn.Module:
    return build()[0]


def main(out: Path, layout: str) -> None:
    import accelerate

    torch.manual_seed(0)
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    for step in range(3):
        torch.manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 3, device=accelerator.device)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    random.seed(accelerator.process_index)
    np.random.seed(accelerator.process_index)
    torch.manual_seed(100 + accelerator.process_index)
    if layout.startswith("fsdp"):
        save_fsdp(accelerator, out, layout, model, optimizer, scheduler, progress)
    else:
        accelerator.save_state(str(out), safe_serialization=layout != "bin")
    held = {"draw": torch.rand(4), "lr": torch.tensor(scheduler.get_last_lr())}
    names = dict(accelerator.unwrap_model(model).named_parameters())
    held |= {f"model/{name}": one.detach().clone() for name, one in names.items()}
    inner = optimizer.optimizer.state
    states = {name: inner[one] for name, one in names.items() if one in inner}
    held |= {f"{key}/{name}": one[key].clone() for name, one in states.items() for key in ("exp_avg", "exp_avg_sq")}
    save_file(held, str(out / f"held_{accelerator.process_index}.safetensors"))
    accelerator.wait_for_everyone()


def save_fsdp(accelerator, out, layout, model, optimizer, scheduler, progress) -> None:  # type: ignore[no-untyped-def]
    from accelerate.checkpointing import save_accelerator_state, save_custom_state
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    kind = "FULL_STATE_DICT" if layout == "fsdp-full" else "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    sharded, inner = build()
    sharded.load_state_dict(accelerator.unwrap_model(model).state_dict())
    names = {id(one): name for name, one in sharded.named_parameters()}
    held = dict(accelerator.unwrap_model(model).named_parameters())
    groups = [[names[id(one)] for one in group["params"]] for group in inner.param_groups]
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(sharded, mesh=mesh)
    here = dict(sharded.named_parameters())
    for group, listed in zip(inner.param_groups, groups, strict=True):
        group["params"] = [here[name] for name in listed]
    from torch.distributed.tensor import distribute_tensor

    for name, one in here.items():
        saved = optimizer.optimizer.state.get(held[name])
        if saved:
            inner.state[one] = {
                key: distribute_tensor(value, one.device_mesh, one.placements) if value.dim() else value
                for key, value in saved.items()
            }
    out.mkdir(exist_ok=True)
    save_fsdp_model(plugin, accelerator, sharded, str(out))
    save_fsdp_optimizer(plugin, accelerator, inner, sharded, str(out))
    save_accelerator_state(str(out), [], [], [scheduler], [], accelerator.process_index, accelerator.step)
    save_custom_state(progress, str(out), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    if dist.is_initialized():
        dist.destroy_process_group()
