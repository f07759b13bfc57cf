"""Every backend, precision and kind of accumulation against one process, over twenty steps."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program
from accel_testing.ranks.pool import RankPool

BACKENDS = ("single", "ddp:2", "ddp:4")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
WINDOWS = ("", "/acc=3", "/acc=3/short", "/weighted", "/acc=3/weighted")
# One of each kind in every run; the rest repeat them in other combinations.
QUICK = {"ddp:2/fp64/acc=3", "ddp:2/fp32/acc=3/short", "ddp:2/bf16/weighted", "ddp:4/fp16/acc=3", "ddp:2/fp8"}
STEPS, SIZE, WIDTH = 20, 24, 32


def program(optimizer: str = "sgd") -> Program:
    """Inner layers are wide enough for fp8, which leaves the first and last as they are."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, SIZE, 16, generator=generator, dtype=torch.float64)
    mixing = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16)
    )
    return Program(
        model,
        lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
        [{"x": one, "y": torch.tanh(one @ mixing)} for one in x],
        optimizer=OPTIMIZERS[optimizer],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        clip=1.0,
    )


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.005),
}


def cases() -> list[Any]:
    names = [f"{backend}/{precision}{window}" for backend, precision, window in product(BACKENDS, PRECISIONS, WINDOWS)]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", cases())
def test_layout_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    if "fp8" in layout:
        pytest.importorskip("torchao", reason="fp8 layers come from torchao")
    assert_equivalent(program, [layout], pool=rank_pool)


@pytest.mark.parametrize(
    "layout", ["ddp:2/fp64/acc=3", pytest.param("ddp:4/fp32/acc=3/weighted", marks=pytest.mark.slow)]
)
def test_layout_equals_one_process_under_adam(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(lambda: program("adam"), [layout], pool=rank_pool)


def test_fp8_really_computes_in_fp8(rank_pool: RankPool) -> None:
    """Its distance is that of eight bits, not of the sixteen it would fall back to."""
    pytest.importorskip("torchao", reason="fp8 layers come from torchao")
    report = assert_equivalent(program, ["single/bf16", "single/fp8"], pool=rank_pool)
    coarse, fine = report.results[1].distance, report.results[0].distance
    assert coarse > 2 * fine
