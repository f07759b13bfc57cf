"""Adapters are trained on a base whose weights are quantized, on one rank and several."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.utils import BnbQuantizationConfig, TorchAOQuantizationConfig, load_and_quantize_model


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def quantized(kind: str) -> nn.Module:
    torch.manual_seed(0)
    skip = ["down", "up"]
    if kind == "int8":
        pytest.importorskip("torchao")
        config = TorchAOQuantizationConfig(torch_dtype=torch.float32, skip_modules=skip)
        return load_and_quantize_model(Adapted(), config)
    pytest.importorskip("bitsandbytes")
    bits = {"load_in_8bit": True} if kind == "8bit" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return load_and_quantize_model(
        Adapted(), BnbQuantizationConfig(**bits, torch_dtype=torch.float32, skip_modules=skip)
    )


@dataclass(frozen=True)
class Trained:
    """What ten steps leave: their losses, how far the base's outputs have moved, and every rank's adapter."""

    losses: list[float]
    moved: float
    adapters: torch.Tensor


def train(kind: str, rank: int) -> Trained:
    accelerator = Accelerator(cpu=True)
    model = quantized(kind)
    for parameter in model.base.parameters():
        parameter.requires_grad = False
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        before = model.base(x).clone()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(10):
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    own = accelerator.unwrap_model(model)
    with torch.no_grad():
        moved = (own.base(x) - before).abs().max().item()
    return Trained(losses, moved, accelerator.gather(own.up.weight.detach()[None].clone()))


@pytest.mark.parametrize("kind", ["int8", "8bit", "4bit"])
def test_adapters_learn_on_a_quantized_base(kind: str) -> None:
    found = train(kind, 0)
    assert found.losses[-1] < found.losses[0]
    assert found.moved == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["int8", "8bit", "4bit"])
def test_adapters_of_two_ranks_learn_the_same(rank: int, kind: str) -> None:
    found = train(kind, rank)
    assert found.losses[-1] < found.losses[0]
    assert found.moved == 0
    assert torch.equal(*found.adapters)
