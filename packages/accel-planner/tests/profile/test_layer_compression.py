"""Repeated blocks: few are traced, and all are counted."""

import dataclasses

import pytest
import torch
from torch import nn

from accel_planner import (
    Batch,
    profile_model,
)
from accel_planner.profile import layer_compression as folding
from accel_planner.profile.profile import Mark, Variant
from accel_testing.equivalence.models import TinyTransformer


def transformer(layers: int = 8, **options: int) -> nn.Module:
    return TinyTransformer(64, 32, layers=layers, **options)


def tokens(batch: int = 4, length: int = 16) -> Batch:
    return Batch(torch.zeros(batch, length, dtype=torch.long))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["no", "bf16", "bf16-true"])
def test_repeated_blocks_are_looked_at_once_and_counted_as_often_as_they_come(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = profile_model(transformer, tokens(), policy=policy).timelines
    monkeypatch.setattr(folding, "foldable", lambda *_: [])
    whole = profile_model(transformer, tokens(), policy=policy).timelines

    def plain(marks: tuple[Mark, ...]) -> list[Mark]:  # operations are copied as a sum, not mark by mark
        return [dataclasses.replace(mark, flops=0) for mark in marks]

    assert {v: plain(t.marks) for v, t in quick.items()} == {v: plain(t.marks) for v, t in whole.items()}
    assert {v: t.flops for v, t in quick.items()} == {v: t.flops for v, t in whole.items()}


class Picky(nn.Module):
    """Looks into its blocks, so that none can be left out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block[1](block[0](x))
        return x


def test_a_model_that_looks_into_its_blocks_is_traced_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="accel_planner.profile.profiler")
    few, many = (profile_model(Picky(layers), Batch(torch.zeros(4, 8))).timelines[Variant()] for layers in (4, 8))
    assert 1.9 < many.flops / few.flops < 2.2
    assert "repeated blocks are looked at one by one: PlanError" in caplog.text
    assert "'PassedOver' object is not subscriptable" in caplog.text


class Residual(nn.Module):
    """Adds each block's input to its output, between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


def test_what_a_model_computes_between_its_blocks_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = profile_model(Residual(), Batch(torch.zeros(4, 8))).timelines
    monkeypatch.setattr(folding, "foldable", lambda *_: [])
    assert quick == profile_model(Residual(), Batch(torch.zeros(4, 8))).timelines
