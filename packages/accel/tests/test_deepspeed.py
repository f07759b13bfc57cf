"""DeepSpeed through an Accelerator: the same weights as one process, states that go anywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_backends import load_backend
from accel_testing import RankPool
from accel_testing.equivalence import assert_equivalent
from accel_testing.layouts import Layout
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


# -------------------------------------------------------------------------------------------------- checkpoints


def run(strategy: str, steps: range, *, folder: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Trains ``steps`` of one run with ``strategy``, from ``folder`` if given; the weights after them."""
    grouped = torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if grouped else (0, 1)
    torch.manual_seed(0)
    layout = Layout.parse(strategy)
    chosen = load_backend(layout.backend).options(dict(layout.options)) if layout.options else layout.backend
    accelerator = Accelerator(cpu=True, strategy=chosen, gradient_accumulation_steps=2)
    model = make_model("transformer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if folder is not None:
        accelerator.load_state(folder)
    for tokens in batches(steps.stop)[steps.start :]:
        for micro in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, tokens.chunk(2 * world)[micro * world + rank]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    accelerator.end_training()
    return {name: value.clone() for name, value in state.items()}


def a_part(strategy: str, start: int, stop: int, folder: str, save: str) -> dict[str, torch.Tensor]:
    return run(strategy, range(start, stop), folder=Path(folder) if folder else None, save=Path(save))


CHAINS = {
    "z3-fsdp-single-z2": ["ds3:2", "fsdp:2", "single:1", "ds2:2"],
    "z1-z3-z0-z2-z3": ["ds1:2", "ds3:2", "ds0:2", "ds2:1", "ds3:1"],
    "ddp-z2-ddp": ["ddp:2", "ds2:2", "ddp:2"],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_continues_in_any_stage_world_size_and_backend(
    rank_pool: RankPool, tmp_path: Path, chain: list[str]
) -> None:
    whole = rank_pool.run(a_part, "single:1", 0, 3 * len(chain), "", str(tmp_path / "whole"), ranks=1)[0]
    folder = ""
    for number, strategy in enumerate(chain):
        target = str(tmp_path / str(number))
        ranks = Layout.parse(strategy).world_size
        state = rank_pool.run(a_part, strategy, 3 * number, 3 * number + 3, folder, target, ranks=ranks)[0]
        folder = target
    assert state.keys() == whole.keys()
    distance = max(((state[name] - value).abs().max() / value.abs().max()).item() for name, value in whole.items())
    assert distance <= 1e-5
