"""Sharded layouts in every precision, kind of accumulation and form of sharding against one process.

The matrix of each layout is a covering array of strength 3: any three values are together in one case. It trains for
``FEW`` steps of SGD; fewer combinations train for twenty steps of AdamW.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from covertable import make
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.equivalence.programs import STEPS, adamw, language_program
from accel_testing.ranks.pool import RankPool

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
WINDOWS = ("", "/acc=3", "/acc=3/short", "/weighted", "/acc=3/weighted")
FLAT = ("", "/sharding_strategy=SHARD_GRAD_OP", "/sharding_strategy=NO_SHARD")
HYBRID = ("/sharding_strategy=HYBRID_SHARD", "/sharding_strategy=HYBRID_SHARD_ZERO2")
CHECKPOINTING, OFFLOAD = "/activation_checkpointing=true", "/cpu_offload=true"
LAYOUTS = {
    "fsdp:2": (FLAT, ("", CHECKPOINTING, OFFLOAD)),
    "fsdp:4": ((*FLAT, "/reshard_after_forward=2"), ("", CHECKPOINTING, OFFLOAD)),
    "hsdp:2x2": (HYBRID, ("", CHECKPOINTING, OFFLOAD)),
    "fsdp1:2": (FLAT, ("", CHECKPOINTING, OFFLOAD)),
}
# One of each kind in every run; the rest repeat them in other combinations.
QUICK = {
    "fsdp:2/fp64/acc=3/short/sharding_strategy=SHARD_GRAD_OP",
    "fsdp:4/fp32/acc=3/weighted/activation_checkpointing=true",
    "hsdp:2x2/bf16/acc=3/sharding_strategy=HYBRID_SHARD/cpu_offload=true",
    "fsdp:2/fp16/weighted",
    "fsdp:2/fp8/acc=3",
    "fsdp1:2/fp64/acc=3/weighted",
}


FEW = 8


def program(optimizer: Callable[[nn.Module], Optimizer] = momentum_sgd, *, steps: int = STEPS) -> Program:
    """A transformer of repeated blocks, whose inner layers are wide enough for fp8."""
    schedule = partial(CosineAnnealingLR, T_max=STEPS)
    return language_program(optimizer, length=8, scheduler=schedule, steps=steps)


def cases() -> Iterator[Any]:
    for layout, (shardings, extras) in LAYOUTS.items():
        rows = make([PRECISIONS, WINDOWS, shardings, extras], strength=3)
        names = {f"{layout}/{''.join(row)}" for row in rows} | {name for name in QUICK if name.startswith(f"{layout}/")}
        for name in sorted(names):
            yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


def test_the_quick_ones_are_of_the_matrix() -> None:
    every = {
        f"{layout}/{''.join(row)}"
        for layout, (shardings, extras) in LAYOUTS.items()
        for row in product(PRECISIONS, WINDOWS, shardings, extras)
    }
    assert every >= {case.values[0] for case in cases()} >= QUICK


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", list(cases()))
def test_a_sharded_layout_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    if "fp8" in layout:
        pytest.importorskip("torchao", reason="fp8 layers come from torchao")
    assert_equivalent(lambda: program(steps=FEW), [layout], pool=rank_pool)


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("fsdp:2/fp64/acc=3/weighted", FEW),
        *(
            pytest.param(f"{layout}/{precision}{window}", STEPS, marks=pytest.mark.slow)
            for layout, precision, window in product(LAYOUTS, ("fp64", "fp32"), WINDOWS)
        ),
    ],
)
def test_a_sharded_layout_equals_one_process_under_adam(rank_pool: RankPool, layout: str, steps: int) -> None:
    assert_equivalent(lambda: program(adamw, steps=steps), [layout], pool=rank_pool)
