"""Training of a small language model, in full or in parts, shared by most tests of backends."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from accel_testing.equivalence.layouts import Layout
from accel_testing.equivalence.models import make_model
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.equivalence.training import DTYPES, open_accelerator
from accel_testing.ranks.pool import RankPool

STEPS, SAMPLES, VOCABULARY = 20, 24, 32


def adamw(model: nn.Module) -> Optimizer:
    """AdamW for a model with attention.

    The gradient of the keys' bias consists of rounding errors, which a small eps would amplify to full steps.
    """
    return AdamW(model.parameters(), lr=0.01, eps=1e-3)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of predicting, for each token (batch, length), the token before it."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def token_batches(length: int = 4, *, steps: int = STEPS) -> list[Tensor]:
    """Global batches of tokens, each (samples, length)."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator) for _ in range(steps)]


def language_program(
    optimizer: Callable[[nn.Module], Optimizer] = momentum_sgd,
    *,
    length: int = 4,
    scheduler: Callable[[Optimizer], Any] | None = None,
    steps: int = STEPS,
) -> Program:
    """Program of a transformer with two blocks and ``steps`` steps with clipping."""
    model, batches = make_model("transformer"), token_batches(length, steps=steps)
    return Program(model, language_loss, batches, optimizer, scheduler=scheduler, clip=0.5)


sgd_program = language_program
adamw_program = partial(language_program, adamw)


@final
class Trained(dict[str, Tensor]):
    """Full weights by name; ``losses`` (micro-batches,) are those of the training so far, averaged over ranks."""

    losses: Tensor


def train_part(
    pool: RankPool,
    layout: str | Layout,
    start: int,
    stop: int,
    load: str = "",
    save: str = "",
    *,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
) -> Trained:
    """Trains a part of one run on the ranks of a layout: its micro-batches from ``start`` to ``stop``.

    A step has ``acc`` micro-batches, so a part can end within a step. Parts under several layouts, each resumed from
    the checkpoint of the previous one, together make the run of one process.

    Args:
        pool: source of the ranks; XLA devices need their own pool, because a process takes them when it first computes.
        layout: as ``Layout`` parses it; ``fp64`` is the dtype of the model.
        start: number of the first micro-batch.
        stop: one past the number of the last micro-batch.
        load: folder of the checkpoint to resume from; empty: the initial weights.
        save: folder of the checkpoint to write; empty: none.
        optimizer: made from the model.

    Returns:
        The full weights afterwards, and the losses of the part.
    """
    spread = Layout.parse(layout) if isinstance(layout, str) else layout
    trained: Trained = pool.run(
        _train_part,
        spread,
        slice(start, stop),
        load,
        save,
        optimizer,
        ranks=spread.processes,
        variables=spread.variables,
    )[0]
    return trained


def _train_part(
    layout: Layout, part: slice, load: str, save: str, optimizer: Callable[[nn.Module], Optimizer]
) -> Trained:
    torch.manual_seed(0)
    accelerator = open_accelerator(layout)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    model = make_model("transformer", dtype=DTYPES.get(layout.precision, torch.float32))
    made = optimizer(model)
    model, made, scheduler = accelerator.prepare(model, made, StepLR(made, 3, 0.5))
    if load:
        accelerator.load_state(load)
    losses: list[Tensor] = []
    for tokens in [micro for batch in token_batches() for micro in batch.chunk(layout.accumulate)][part]:
        with accelerator.accumulate(model):
            loss = language_loss(model, tokens.chunk(ranks)[rank].to(accelerator.device))
            accelerator.backward(loss)
            losses.append(loss.detach())
            made.step()
            scheduler.step()
            made.zero_grad()
    if save:
        accelerator.save_state(save)
    state = Trained({name: value.clone() for name, value in accelerator.get_state_dict(model).items()})
    state.losses = accelerator.reduce(torch.stack(losses), "mean").cpu()
    accelerator.free_memory()
    accelerator.end_training()
    return state
