"""Training loops drawn at random end with the weights of a plain loop, also if they are resumed on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel import Accelerator
from accel_backends import DDPConfig, FSDPConfig
from accel_deepspeed import DeepSpeedConfig

MICRO_BATCHES, ROWS, WIDTH = 16, 2, 3
WRITER, CRITIC = 0, 1
INSTALLED = find_spec("deepspeed") is not None
ZERO = {f"zero{stage}": DeepSpeedConfig(zero_stage=stage) for stage in ((2, 3) if INSTALLED else ())}
FSDP2 = {
    "fsdp": FSDPConfig(find_unused_parameters=True),
    "fsdp, resharded late": FSDPConfig(find_unused_parameters=True, reshard_after_forward=False),
}
# torch 2.13 is the first whose FSDP 2 leaves parameters out.
SHARDED = FSDP2 if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else {}
STRATEGIES = {"ddp": DDPConfig(find_unused_parameters=True), **SHARDED, "fsdp1": "fsdp1", **ZERO}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.02),
}


@dataclass(frozen=True)
class Program:
    """A training loop of one network, or of two that step in turn.

    Attributes:
        window: micro-batches of a step.
        clears: ``zero_grad`` is called before the backward, or after the step.
        to_none: argument of ``zero_grad``.
        turns: network of each micro-batch.
        weighted: losses are sums, divided by the rows of the window.
        max_norm: gradients are clipped to this norm; None: they are not.
        partial, empty, evaluated, edited: micro-batches that leave a part of the network out, that have no backward,
            that an evaluation follows, and after which the weights are changed if they end a window.
        parts: strategies, and the micro-batch before which each is replaced by the next.
    """

    window: int
    clears: str
    to_none: bool
    optimizer: str
    turns: tuple[int, ...]
    weighted: bool
    max_norm: float | None
    partial: frozenset[int]
    empty: frozenset[int]
    evaluated: frozenset[int]
    edited: frozenset[int]
    parts: tuple[tuple[str | None, int], ...]

    @property
    def dtype(self) -> torch.dtype:
        """ZeRO's engines train in float32 at most."""
        return torch.float32 if any(name in ZERO for name, _ in self.parts) else torch.float64

    @property
    def networks(self) -> int:
        return 1 + max(self.turns)


def drawn(seed: int, strategies: list[str | None]) -> Program:
    """A program, its parts with strategies of the list.

    FSDP 1 gives parameters that were left out a zero gradient. ZeRO clears gradients to none, and trains weights of its
    own, which edits do not reach.
    """
    draw = Random(seed)
    two = draw.random() < 0.4
    critic_turns = draw.randint(1, 3)
    turns = [CRITIC if number % (critic_turns + 1) < critic_turns else WRITER for number in range(MICRO_BATCHES)]
    stops = [*sorted(draw.sample(range(1, MICRO_BATCHES), draw.randint(0, 2))), MICRO_BATCHES]
    parts = tuple((draw.choice(strategies), stop) for stop in stops)
    names = {str(name) for name, _ in parts}
    zero = not names.isdisjoint(ZERO)

    def some(share: float) -> frozenset[int]:
        return frozenset(number for number in range(MICRO_BATCHES) if draw.random() < share)

    return Program(
        window=draw.randint(1, 3),
        clears=draw.choice(["before", "after"]),
        to_none=draw.random() < 0.6 or zero,
        optimizer=draw.choice(list(OPTIMIZERS)),
        turns=tuple(turns) if two else (0,) * MICRO_BATCHES,
        weighted=not two and draw.random() < 0.3,
        max_norm=draw.choice([None, 0.1]),
        partial=some(0.4) if draw.random() < 0.5 and "fsdp1" not in names else frozenset(),
        empty=some(0.2) if not two and draw.random() < 0.5 else frozenset(),
        evaluated=some(0.2),
        edited=frozenset() if zero else some(0.2),
        parts=parts,
    )


class Network(nn.Module):
    """Two layers, and a part beside them that a call may leave out."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, outputs))
        self.part = nn.Linear(WIDTH, outputs)

    def forward(self, rows: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
        return self.body(rows) if partial else self.body(rows) + self.part(rows)


def networks(program: Program) -> list[Network]:
    torch.manual_seed(0)
    return [Network(outputs).to(program.dtype) for outputs in (WIDTH, 1)[: program.networks]]


def batches(program: Program, ranks: int) -> list[torch.Tensor]:
    """The rows of all ranks, by micro-batch."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ranks * ROWS, WIDTH, generator=generator).to(program.dtype) for _ in range(MICRO_BATCHES)]


def losses(program: Program, models: Any, rows: torch.Tensor, number: int) -> torch.Tensor:
    """The loss of each row in one micro-batch."""
    partial = number in program.partial
    if program.networks == 1:
        return (models[WRITER](rows, partial=partial) - rows.flip(1)).square().sum(1)
    if program.turns[number] == WRITER:
        return (models[CRITIC](models[WRITER](rows, partial=partial)) - 1).square().sum(1)
    with torch.no_grad():
        made = models[WRITER](rows)
    return models[CRITIC](made, partial=partial).square().sum(1)


def evaluate(model: nn.Module, rows: torch.Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(rows)
    model.train()


def plain(program: Program, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Weights after a loop of plain torch over the batches of all ranks."""
    models = networks(program)
    optimizers = [OPTIMIZERS[program.optimizer](model.parameters()) for model in models]
    positions = [0] * len(models)
    for number, rows in enumerate(batches(program, ranks)):
        turn = program.turns[number]
        model, optimizer = models[turn], optimizers[turn]
        if program.clears == "before" and positions[turn] == 0:
            optimizer.zero_grad(set_to_none=program.to_none)
        if number not in program.empty:
            (losses(program, models, rows, number).mean() / program.window).backward()
        positions[turn] = (positions[turn] + 1) % program.window
        if positions[turn] == 0:
            if program.weighted:
                for gradient in (one.grad for one in model.parameters() if one.grad is not None):
                    gradient *= share_of_losses(program, number)
            if program.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.max_norm)
            optimizer.step()
            if program.clears == "after":
                optimizer.zero_grad(set_to_none=program.to_none)
            if number in program.edited:
                edit(model)
    return [model.state_dict() for model in models]


def share_of_losses(program: Program, last: int) -> float:
    """Micro-batches of a window for each that has a loss: the mean of weighted losses leaves the others out."""
    given = sum(number not in program.empty for number in range(last + 1 - program.window, last + 1))
    return program.window / max(given, 1)


@torch.no_grad()
def edit(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def segments(program: Program) -> Iterator[tuple[str | None, range]]:
    """Strategies, and the micro-batches that each trains."""
    first = 0
    for strategy, stop in program.parts:
        yield strategy, range(first, stop)
        first = stop


def trained(program: Program, folder: Path, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Weights after the program, each part of which begins with the checkpoint of the one before."""
    rows_of = batches(program, ranks)
    states: list[dict[str, torch.Tensor]] = []
    for strategy, numbers in segments(program):
        accelerator = Accelerator(
            cpu=True, strategy=STRATEGIES.get(str(strategy), strategy), gradient_accumulation_steps=program.window
        )
        made = [
            accelerator.prepare(model, OPTIMIZERS[program.optimizer](model.parameters())) for model in networks(program)
        ]
        models, optimizers = [model for model, _ in made], [optimizer for _, optimizer in made]
        if numbers[0] > 0:
            accelerator.load_state(folder / str(numbers[0]))
        for number in numbers:
            turn, rows = program.turns[number], rows_of[number][rank * ROWS : (rank + 1) * ROWS]
            with accelerator.accumulate(models[turn]):
                train(program, accelerator, models, optimizers, rows, number)
            if number in program.edited and accelerator.sync_gradients:
                edit(models[turn])
            if number in program.evaluated:
                evaluate(models[WRITER], rows)
        if numbers[-1] + 1 < MICRO_BATCHES:
            accelerator.save_state(folder / str(numbers[-1] + 1))
        states = [accelerator.get_state_dict(model) for model in models]
        accelerator.free_memory()
        accelerator.end_training()
    return states


def train(
    program: Program, accelerator: Accelerator, models: Any, optimizers: Any, rows: torch.Tensor, number: int
) -> None:
    """One micro-batch, as users write it."""
    turn = program.turns[number]
    model, optimizer = models[turn], optimizers[turn]
    if program.clears == "before":
        optimizer.zero_grad(set_to_none=program.to_none)
    if number not in program.empty:
        each = losses(program, models, rows, number)
        if program.weighted:
            accelerator.backward(each.sum(), weight=len(each))
        else:
            accelerator.backward(each.mean())
    if program.max_norm is not None and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), program.max_norm)
    optimizer.step()
    if program.clears == "after":
        optimizer.zero_grad(set_to_none=program.to_none)


def check(program: Program, folder: Path, rank: int, ranks: int) -> None:
    tolerance = 1e-10 if program.dtype == torch.float64 else 1e-5
    for expected, found in zip(plain(program, ranks), trained(program, folder, rank, ranks), strict=True):
        for name in expected if found else ():  # full states of sharded models are on the main process
            torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=str(program))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200))
def test_one_process_ends_with_the_weights_of_a_plain_loop(seed: int, tmp_path: Path) -> None:
    check(drawn(seed, [None]), tmp_path, 0, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.ranks(2)
def test_ranks_end_with_the_weights_of_a_plain_loop(rank: int, world_size: int, seed: int, tmp_path: Path) -> None:
    check(drawn(seed, list(STRATEGIES)), tmp_path, rank, world_size)
