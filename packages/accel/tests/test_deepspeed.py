"""DeepSpeed through an Accelerator: the same weights as one process, states that go anywhere."""

from collections.abc import Callable
from importlib.util import find_spec
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

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

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


# ------------------------------------------------------------------------------------------ operations on the host


def built(operation: str) -> bool:
    """Whether an operation is there already; building it takes longer than a test may."""
    from accel_backends.deepspeed_library import extensions_folder

    return (extensions_folder() / operation / f"{operation}.so").exists()


needs_cpu_adam = pytest.mark.skipif(
    not built("cpu_adam"), reason="DeepSpeed's cpu_adam is not built; hatch run deepspeed-operations builds it"
)


@needs_cpu_adam
@pytest.mark.parametrize(
    "layout",
    [
        "ds1:2/fp32/acc=3/weighted/offload_optimizer=cpu",
        "ds2:2/fp32/acc=3/offload_optimizer=cpu",
        "ds2:2/bf16/acc=3/offload_optimizer=cpu",
        "ds3:2/fp32/acc=3/short/offload_optimizer=cpu/offload_param=cpu",
        "ds3:2/bf16/offload_optimizer=cpu",
    ],
)
def test_training_with_the_optimizer_on_the_host_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(adamw_program, [layout], pool=rank_pool)


@needs_cpu_adam
def test_offloaded_states_go_on_elsewhere(rank_pool: RankPool, tmp_path: Path) -> None:
    whole = rank_pool.run(a_part, "single:1", 0, 6, "", str(tmp_path / "whole"), ranks=1)[0]
    rank_pool.run(a_part, "ds3:2/offload_optimizer=cpu/offload_param=cpu", 0, 3, "", str(tmp_path / "a"), ranks=2)
    state = rank_pool.run(
        a_part, "ds2:2/offload_optimizer=cpu", 3, 6, str(tmp_path / "a"), str(tmp_path / "b"), ranks=2
    )[0]
    distance = max(((state[name] - value).abs().max() / value.abs().max()).item() for name, value in whole.items())
    assert distance <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("program", [sgd_program, adamw_program], ids=["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("window", ["", "/acc=3", "/acc=3/weighted", "/acc=3/short"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_equals_one_process_in_every_combination(
    rank_pool: RankPool, stage: int, window: str, precision: str, program: Callable[[], Program]
) -> None:
    assert_equivalent(program, [f"ds{stage}:2/{precision}{window}"], pool=rank_pool)


# ------------------------------------------------------------------------------------------------- an open window


def half_a_window(strategy: str, folder: str, save: str) -> dict[str, torch.Tensor]:
    """A step of four micro-batches, of which the first two run before saving and the rest after loading."""
    grouped = torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if grouped else (0, 1)
    torch.manual_seed(0)
    layout = Layout.parse(strategy)
    chosen = load_backend(layout.backend).options(dict(layout.options)) if layout.options else layout.backend
    accelerator = Accelerator(cpu=True, strategy=chosen, gradient_accumulation_steps=4)
    model = make_model("transformer")
    model, optimizer = accelerator.prepare(model, momentum(model))
    if folder:
        accelerator.load_state(folder)
    tokens = batches(1)[0]
    for micro in range(2 if folder else 0, 2 if save else 4):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, tokens.chunk(4 * world)[micro * world + rank]))
            optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    accelerator.end_training()
    return state


@pytest.mark.parametrize("chain", [("ds2:2", "ds3:2"), ("ds3:2", "ds1:1"), ("ds0:2", "ds2:2")], ids="-".join)
def test_a_window_that_was_open_goes_on(rank_pool: RankPool, tmp_path: Path, chain: tuple[str, str]) -> None:
    before, after = chain
    rank_pool.run(half_a_window, before, "", str(tmp_path / "open"), ranks=Layout.parse(before).world_size)
    state = rank_pool.run(half_a_window, after, str(tmp_path / "open"), "", ranks=Layout.parse(after).world_size)[0]
    whole = rank_pool.run(half_a_window, "single:1", "", "", ranks=1)[0]
    if Layout.parse(after).world_size == 2:  # on one rank the second half is other micro-batches
        distance = max(((state[name] - value).abs().max() / value.abs().max()).item() for name, value in whole.items())
        assert distance <= 1e-5
