"""Positions of a sequence that each rank of a group holds, and blocks of scores that it computes."""

from dataclasses import dataclass

import torch

from accel_state.errors import PrepareError


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Queries and keys, as local slices, of one block of scores, and whether the block is causal along its diagonal."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """Division of sequences among ``size`` ranks.

    Balanced, a sequence has twice as many chunks as ranks, and each rank holds one from its head and the one at the
    same distance from its tail, so that all ranks compute as many causal scores (the zig-zag order; Brandon et al.
    2023, arXiv:2311.09431, balance by stripes instead). Otherwise rank ``r`` holds the ``r``-th part. Local positions
    ascend in both.
    """

    size: int
    balanced: bool = True

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks of a sequence."""
        return 2 * self.size if self.balanced else self.size

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Chunks of a rank, ascending."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def positions(self, length: int, rank: int, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Positions, in sequences of ``length`` tokens, of the tokens that a rank holds.

        Raises:
            PrepareError: the length does not divide into the chunks.
        """
        if length % self.num_chunks:
            raise PrepareError(
                f"sequences of {length} tokens do not divide into {self.num_chunks} chunks for {self.size} "
                f"ranks; nearest: pad them to {length + -length % self.num_chunks}"
            )
        chunk = length // self.num_chunks
        spans = [torch.arange(index * chunk, (index + 1) * chunk, device=device) for index in self.chunks(rank)]
        return torch.cat(spans)

    def block(self, rank: int, source: int, length: int, *, causal: bool) -> ScoreBlock | None:
        """Block of scores of a rank's queries and the keys of ``source``, each ``length`` tokens; None: all masked.

        Blocks of other ranks' keys have no diagonal: each of the chunks is entirely before or behind the others.
        """
        every = slice(0, length)
        if rank == source or not causal:
            return ScoreBlock(every, every, causal=causal)
        if not self.balanced:
            return ScoreBlock(every, every, causal=False) if source < rank else None
        half = length // 2
        if source < rank:
            return ScoreBlock(every, slice(0, half), causal=False)
        return ScoreBlock(slice(half, length), every, causal=False)
