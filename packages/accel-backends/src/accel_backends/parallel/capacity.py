"""Capacity of experts: how many of a rank's choices each expert computes, and which are dropped."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from accel_state.parallelism.config import ParallelismConfig


@final
class Capacity:
    """Bound on the choices that each expert computes of one forward's tokens on one rank; counts those it drops.

    An expert computes ``ceil(factor * tokens * choices / experts)`` of them, where ``tokens`` are those of the rank and
    ``choices`` the experts that each token chooses. First choices of all tokens come before second ones, and within
    these tokens come in their order, as in GShard (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1); a dropped
    choice contributes zero, as in Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, section 2.2), and the
    weights of the others stay as they are.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        # The number as it is written: in floating point 1.1 * 50 is above 55.
        self._exact = Fraction(str(factor))
        self._counts: torch.Tensor | None = None

    def kept(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Which choices are computed (bool, tokens x choices), of the experts in ``index`` (tokens x choices).

        Without communication. The choices are counted for ``take_counts``.
        """
        tokens, choices = index.shape
        capacity = math.ceil(self._exact * tokens * choices / experts)
        by_priority = index.T.flatten()
        order = torch.argsort(by_priority, stable=True)
        chosen = count_choices(by_priority, experts)
        before = chosen.cumsum(0) - chosen
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - before[by_priority[order]]
        kept = (place < capacity).view(choices, tokens).T
        counts = torch.stack([(~kept).sum(), torch.full((), index.numel(), device=index.device)])
        self._counts = counts if self._counts is None else self._counts + counts
        return kept

    def take_counts(self) -> torch.Tensor | None:
        """Numbers of dropped and of all choices on this rank (int64, 2) since the last call; None without a forward."""
        counts, self._counts = self._counts, None
        return counts

    def take_counts_on(self, device: torch.device) -> torch.Tensor:
        """As ``take_counts``, and zeros on ``device`` without a forward, so that ranks can sum the counts."""
        counts = self.take_counts()
        return torch.zeros(2, dtype=torch.int64, device=device) if counts is None else counts


def capacity_of(parallelism: "ParallelismConfig") -> Capacity | None:
    """Capacity that the options of the expert-parallel axis give; None: experts compute every choice."""
    options = parallelism.ep_handler
    return None if options is None or options.capacity_factor is None else Capacity(options.capacity_factor)


def count_choices(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is in ``chosen`` (int64, any shape); without a wait for the device, unlike ``bincount``."""
    flat = chosen.flatten().long()
    return flat.new_zeros(experts).scatter_add(0, flat, torch.ones_like(flat))
