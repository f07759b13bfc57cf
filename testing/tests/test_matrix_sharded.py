"""Sharded layouts in every precision, kind of accumulation and form of sharding against one process."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.equivalence import assert_equivalent
from accel_testing.models import make_model
from accel_testing.pool import RankPool
from accel_testing.program import Program

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")
WINDOWS = ("", "/acc=3", "/acc=3/short", "/weighted", "/acc=3/weighted")
FLAT = ("", "/sharding_strategy=SHARD_GRAD_OP", "/sharding_strategy=NO_SHARD")
HYBRID = ("/sharding_strategy=HYBRID_SHARD", "/sharding_strategy=HYBRID_SHARD_ZERO2")
CHECKPOINTING, OFFLOAD = "/activation_checkpointing=true", "/cpu_offload=true"
LAYOUTS = {
    "fsdp:2": (FLAT, ("", CHECKPOINTING, OFFLOAD)),
    "fsdp:4": ((*FLAT, "/reshard_after_forward=2"), ("", CHECKPOINTING, OFFLOAD)),
    "hsdp:2x2": (HYBRID, ("", CHECKPOINTING, OFFLOAD)),
    "fsdp1:2": (FLAT, ("", CHECKPOINTING)),  # it offloads from accelerators only
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
STEPS, SIZE, LENGTH = 20, 24, 8


def program(optimizer: str = "sgd") -> Program:
    """A transformer of repeated blocks, whose inner layers are wide enough for fp8."""
    generator = torch.Generator().manual_seed(3)
    return Program(
        make_model("transformer"),
        lambda model, tokens: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()),
        list(torch.randint(0, 32, (STEPS, SIZE, LENGTH), generator=generator)),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        clip=0.5,
    )


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    # The bias of attention's keys has no gradient but rounding errors, which a small eps would blow up to full steps.
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


def cases() -> Iterator[Any]:
    for layout, (shardings, extras) in LAYOUTS.items():
        for precision, window, sharding, extra in product(PRECISIONS, WINDOWS, shardings, extras):
            name = f"{layout}/{precision}{window}{sharding}{extra}"
            yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


def test_the_quick_ones_are_of_the_matrix() -> None:
    assert {case.values[0] for case in cases()} >= QUICK


@pytest.mark.parametrize("layout", list(cases()))
def test_a_sharded_layout_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    if "fp8" in layout:
        pytest.importorskip("torchao", reason="fp8 layers come from torchao")
    assert_equivalent(program, [layout], pool=rank_pool)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp:2/fp64/acc=3/weighted",
        *(
            pytest.param(f"{layout}/{precision}{window}", marks=pytest.mark.slow)
            for layout, precision, window in product(LAYOUTS, ("fp64", "fp32"), WINDOWS)
        ),
    ],
)
def test_a_sharded_layout_equals_one_process_under_adam(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(lambda: program("adam"), [layout], pool=rank_pool)
