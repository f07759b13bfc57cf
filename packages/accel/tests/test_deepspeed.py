"""DeepSpeed through an Accelerator: the same weights as one process, states that go anywhere."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from accel_testing import RankPool
from accel_testing.equivalence import assert_equivalent
from accel_testing.models import make_model
from accel_testing.program import Program

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

STEPS, GLOBAL, LENGTH = 20, 24, 4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The bias of attention's keys has no gradient but rounding errors, which a small eps would blow up to full steps.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 32, (GLOBAL, LENGTH), generator=generator) for _ in range(steps)]


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def sgd_program() -> Program:
    return Program(make_model("transformer"), mean_loss, batches(), momentum, clip=0.5)


def adamw_program() -> Program:
    return Program(make_model("transformer"), mean_loss, batches(), adamw, clip=0.5)


@pytest.mark.parametrize(
    ("layout", "program"),
    [
        ("ds0:2/fp32/acc=3/weighted", sgd_program),
        ("ds1:2/fp32/acc=3/short", adamw_program),
        ("ds2:2/fp32/acc=3/weighted", sgd_program),
        ("ds3:2/fp32/acc=3/short", adamw_program),
        ("ds3:2/fp32", sgd_program),
        ("ds0:2/bf16/acc=3", adamw_program),
        ("ds1:2/bf16/acc=3", adamw_program),
        ("ds2:2/bf16", adamw_program),
        ("ds3:2/bf16/acc=3", adamw_program),
        ("ds2:1/fp32/acc=3", adamw_program),
    ],
)
def test_training_equals_one_process(rank_pool: RankPool, layout: str, program: Callable[[], Program]) -> None:
    assert_equivalent(program, [layout], pool=rank_pool)
