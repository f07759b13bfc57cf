"""Methods of a backend about the distribution of work; the defaults are those of full models and whole samples."""

from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.session import Session

Attention = Callable[..., torch.Tensor]
"""Queries, keys and values (samples, tokens, heads, size), and what else it takes, to the same shape."""


class BackendSpread(ABC):
    """The part of ``Backend`` that states which ranks hold what of a model, and work on what of a sample."""

    session: "Session"

    @property
    def degrees(self) -> tuple[int, int]:
        """How many replicas of a model there are, and over how many ranks each is sharded. Default: all replicas."""
        return self.session.world_size, 1

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Over how many ranks every sample is spread, by axis of ``ParallelismConfig``. Default: over none."""
        return {}

    @property
    def rng_seed_rank(self) -> int:
        """The rank whose random numbers this rank draws, because both drop out of the same. Default: its own."""
        return self.session.rank

    @property
    def sequence_group(self) -> "ProcessGroup | None":
        """The ranks that share this rank's sequences, in their order; collective when first read. Default: none do."""
        return None

    def sequence_attention(self, attention: Attention) -> Attention:
        """An attention over full sequences, wherever ranks have a part of each; collective. Default: the same.

        Use it where a model attends: ``attention`` then gets all tokens of some heads, and what is returned takes and
        gives this rank's tokens of all heads.
        """
        return attention
