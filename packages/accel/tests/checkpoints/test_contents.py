"""What a run saves has the names that the page about the format gives, for readers that know nothing of accel."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator


class Best:
    def state_dict(self) -> dict[str, float]:
        return {"loss": 0.5}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


def tensor_of(folder: Path, name: str) -> torch.Tensor:
    """A tensor put together from the boxes that the manifest lists."""
    entry = json.loads((folder / "manifest.json").read_bytes())["tensors"][name]
    whole = torch.full(entry["shape"], torch.nan, dtype=getattr(torch, entry["dtype"]))
    for file, key, offset, shape in entry["parts"]:
        with safe_open(folder / file, "pt") as opened:
            box = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
            whole[box] = opened.get_tensor(key)
    return whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_states_and_metadata_are_as_the_page_says(strategy: str, rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2, project_dir=tmp_path)
    torch.manual_seed(3)
    nets = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)
    adam = torch.optim.AdamW([*nets[0].parameters(), *nets[1].parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=1)
    loader = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=4, shuffle=True)
    first, second, optimizer, scheduler, loader = accelerator.prepare(*nets, adam, schedule, loader)
    accelerator.register_for_checkpointing(Best())
    for step, (x,) in enumerate(loader):
        with accelerator.accumulate(first, second):
            accelerator.backward(second(first(x)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == 2:
            break
    folder = Path(str(accelerator.save_state(tmp_path / "saved", metadata={"why": "to look"})))
    accelerator.wait_for_everyone()
    tree = json.loads((folder / "tree.json").read_bytes())
    assert set(tree) == {"model", "model_1", "optimizer", "scheduler", "loader", "clock", "custom"}
    assert set(tree["model_1"]) == {"weight", "bias"}
    assert set(tree["model"]) > {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"}
    assert [tree["loader"][key] for key in ("epoch", "samples")] == [0, 24]  # three times four on each of two ranks
    assert tree["clock"] == {"steps": {"": [3, 1, 2]}}
    assert tree["custom"] == {"loss": 0.5}
    assert tree["scheduler"]["last_epoch"] == 1
    (group,) = tree["optimizer"]["param_groups"]
    assert group["params"] == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.weight", "1.bias"]
    assert set(tree["optimizer"]["state"]["1.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    weight = accelerator.unwrap_model(second).weight
    assert_saved(folder, tree["model_1"]["weight"], weight)
    moments = tree["optimizer"]["state"]["1.weight"]
    assert_saved(folder, moments["exp_avg"], optimizer.optimizer.state[weight]["exp_avg"])
    own = json.loads((folder / f"local-{rank:05d}.json").read_bytes())
    assert set(own) == {"rng", "gradients"}
    assert set(own["rng"]) >= {"python", "torch"}
    assert set(own["gradients"]) == {"0", "1"}
    metadata = json.loads((folder / "manifest.json").read_bytes())["metadata"]
    assert set(metadata) == {"accel", "user", "seed", "config", "topology", "strategy", "numbers", "companions"}
    assert (metadata["user"], metadata["strategy"]) == ({"why": "to look"}, strategy)
    assert metadata["config"]["values"]["gradient_accumulation_steps"] == 2


def assert_saved(folder: Path, place: Any, value: torch.Tensor) -> None:
    """The tensor at ``place`` of a tree is what this run holds, whole."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert torch.equal(tensor_of(folder, place["$tensor"]), whole.detach())
