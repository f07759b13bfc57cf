"""Samples of the contracts, and their split: the same global batches on any number of ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Samples of one optimizer step, divisible into 3 micro-batches on 2 ranks.
ROWS = 12
WIDTH, OUT, VOCABULARY, LENGTH = 6, 3, 11, 4

#: Part of a model that processes a sample, as a function of step, micro-batch, half of the micro-batch (0 or 1: the
#: halves of two ranks) and row of the step.
Route = Callable[[int, int, int, int], int]


class SampleBatch(NamedTuple):
    """A batch of samples.

    ``x`` is (rows, ``WIDTH``), ``y`` (rows, ``OUT``), ``tokens`` (rows, ``LENGTH``) int64, ``route`` (rows,) int64 and
    ``counted`` (rows,), 1 for a sample that counts in a weighted loss and otherwise 0.
    """

    x: Tensor
    y: Tensor
    tokens: Tensor
    route: Tensor
    counted: Tensor


def make_samples(steps: int, route: Route, *, accumulate: int = 1, dtype: torch.dtype = torch.float64) -> SampleBatch:
    """All samples of ``steps`` optimizer steps, in training order."""
    generator = torch.Generator().manual_seed(11)
    rows = steps * ROWS
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    mixing = torch.randn(WIDTH, OUT, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    micro = ROWS // accumulate
    routes = [
        route(row // ROWS, row % ROWS // micro, int(row % micro >= micro // 2), row % ROWS) for row in range(rows)
    ]
    counted = torch.tensor([float(row % 5 not in (0, 3)) for row in range(rows)], dtype=torch.float64)
    return SampleBatch(x.to(dtype), torch.tanh(x @ mixing).to(dtype), tokens, torch.tensor(routes), counted.to(dtype))


def probe(dtype: torch.dtype) -> Tensor:
    """Inputs that are equal on every rank, to compare a model's outputs."""
    return torch.linspace(-1.0, 1.0, 5 * WIDTH, dtype=torch.float64).view(5, WIDTH).to(dtype)


def one_part(step: int, micro: int, half: int, row: int) -> int:
    """All samples go to the first part."""
    return 0


def other_part_in_odd_steps(step: int, micro: int, half: int, row: int) -> int:
    """The parts alternate from step to step."""
    return step % 2


def both_parts_but_in_one_half(step: int, micro: int, half: int, row: int) -> int:
    """The second part gets samples of the first half only, so one of two ranks never uses it."""
    return row % 2 if half == 0 else 0


def a_part_for_each_half(step: int, micro: int, half: int, row: int) -> int:
    """Each of two ranks uses one part."""
    return half


def other_part_in_one_micro_batch(step: int, micro: int, half: int, row: int) -> int:
    """The second micro-batch of a window goes to the second part, the others to the first."""
    return int(micro == 1)


def other_part_in_last_micro_batch(step: int, micro: int, half: int, row: int) -> int:
    """Only the last micro-batch of a window also uses the second part."""
    return row % 2 if micro == 2 else 0


def other_part_in_all_of_last_micro_batch(step: int, micro: int, half: int, row: int) -> int:
    """The last micro-batch of a window goes to the second part, the others to the first."""
    return int(micro == 2)


def other_part_in_last_micro_batch_of_second_step(step: int, micro: int, half: int, row: int) -> int:
    """The second part gets one micro-batch, which ends the second window."""
    return int(step == 1 and micro == 2)


def one_part_in_second_step(step: int, micro: int, half: int, row: int) -> int:
    """Both parts are used, except in the second step."""
    return 0 if step == 1 else row % 2


def experts(step: int, micro: int, half: int, row: int) -> int:
    """Three experts: both halves use the first, and each half one of the others, which alternate with the step."""
    return row % 2 * (1 + (half + step) % 2)
