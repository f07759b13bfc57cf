"""The positions of an epoch that each rank reads in each step: pure functions, without iterating over other ranks'.

A *step* is one batch on every rank. A sharding is a value that knows the batch size and the number of ranks; asked
about the step that begins at a position, it names each rank's rows and where the step ends. Positions run over the
epoch's order (``accel_data.order.orders``), so they are the same on any number of ranks.
"""

from dataclasses import dataclass
from typing import Protocol, final

from accel_data.order.cursor import Window
from accel_state.errors import ConfigError, DataError

UNKNOWN_TOTAL = 1 << 62
"""The length of an epoch whose end has not been seen yet."""


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` positions from ``first`` on, ``stride`` apart; the first ``real`` of them are new, the rest padding.

    Positions at or past the end of the epoch are padding; ``Sharding.wrap`` says which sample is repeated there.
    """

    first: int
    count: int
    real: int
    stride: int = 1

    def positions(self) -> range:
        """The positions, before padding is wrapped."""
        return range(self.first, self.first + self.count * self.stride, self.stride)


class Sharding(Protocol):
    """How steps are cut from an epoch of ``total`` positions, as seen from ``position``.

    A sharding of an epoch whose end is not known yet has ``total`` = ``UNKNOWN_TOTAL``.
    """

    @property
    def total(self) -> int:
        """Positions of the epoch."""

    def rows(self, position: int, rank: int) -> Rows | None:
        """What data rank ``rank`` reads in the step that begins at ``position``; None: it has no batch."""

    def seek(self, position: int, steps: int) -> int:
        """Where the epoch is ``steps`` steps after ``position``; never past ``total``."""

    def steps(self, position: int) -> int:
        """How many steps are left at ``position``, over all ranks."""

    def run(self, position: int) -> int:
        """How many steps from here on are this step, shifted by what it takes: they are computed all at once."""

    def window(self, position: int, rank: int) -> Window | None:
        """The place of that step in its global batch, or None where steps are all there is."""


def wrap(position: int, total: int, num_nodes: int = 1) -> int:
    """The position whose sample is repeated at ``position``: from the start of the epoch, of the same node's part."""
    if position < total:
        return position
    node, local = position % num_nodes, position // num_nodes
    length = total // num_nodes + (node < total % num_nodes)
    if not length:
        raise DataError(f"node {node} of {num_nodes} holds no sample of a dataset of {total}; use fewer nodes")
    return node + num_nodes * (local % length)


def batches_of(sharding: Sharding, position: int, rank: int) -> int:
    """How many batches data rank ``rank`` gets from ``position`` to the end of the epoch."""
    steps = sharding.steps(position)
    if steps and sharding.rows(sharding.seek(position, steps - 1), rank) is None:
        return steps - 1
    return steps


def real_counts(sharding: Sharding, position: int, num_ranks: int) -> tuple[int, ...]:
    """By data rank: how many of the first rows of its batch are real in the step at ``position``; -1: no batch."""
    shares = (sharding.rows(position, rank) for rank in range(num_ranks))
    return tuple(-1 if rows is None else rows.real for rows in shares)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByIndex:
    """Batches interleaved over the ranks: rank ``r`` reads the ``r``-th ``batch_size`` positions of every step.

    ``batch_size`` is one rank's. ``even``: the last step is filled from the start of the epoch; else ranks at its end
    get a short batch or none. With one rank there is nothing to even out.
    """

    total: int
    batch_size: int
    num_ranks: int
    even: bool = True
    drop_last: bool = False

    def rows(self, position: int, rank: int) -> Rows | None:
        """``batch_size`` positions, fewer at the end unless they are evened."""
        first = position + rank * self.batch_size
        real = min(max(self.total - first, 0), self.batch_size)
        if self.even and self.num_ranks > 1:
            return Rows(first, self.batch_size, real)
        return Rows(first, real, real) if real else None

    def seek(self, position: int, steps: int) -> int:
        """``steps`` times what all ranks take."""
        return min(position + steps * self.batch_size * self.num_ranks, self.total)

    def steps(self, position: int) -> int:
        """Whole steps, and one more for a rest that is not dropped."""
        full, rest = divmod(max(self.total - position, 0), self.batch_size * self.num_ranks)
        return full + (rest > 0 and not self.drop_last)

    def run(self, position: int) -> int:
        """All steps that are full on every rank."""
        return max(self.total - position, 0) // (self.batch_size * self.num_ranks)

    def window(self, position: int, rank: int) -> None:
        """Every step stands for itself."""
        return


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByNode:
    """Every rank reads from its node's contiguous range only; ranks of a node interleave their batches in it.

    Goes with the ``NodeBlocks`` order, whose positions go round the nodes. Ranks of one node are neighbours.

    Raises:
        DataError: the ranks cannot be spread equally over the nodes.
    """

    total: int
    batch_size: int
    num_ranks: int
    num_nodes: int
    even: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_nodes:
            raise DataError(f"{self.num_ranks} data ranks cannot be spread equally over num_nodes={self.num_nodes}")

    def rows(self, position: int, rank: int) -> Rows | None:
        """``batch_size`` positions of the rank's node."""
        node, local_rank = divmod(rank, self.num_ranks // self.num_nodes)
        # A position inside a round of the nodes only occurs at the end of an epoch.
        local = -(-position // self.num_nodes) + local_rank * self.batch_size
        length = self.total // self.num_nodes + (node < self.total % self.num_nodes)
        real = min(max(length - local, 0), self.batch_size)
        first = node + self.num_nodes * local
        if self.even and self.num_ranks > 1:
            return Rows(first, self.batch_size, real, self.num_nodes)
        return Rows(first, real, real, self.num_nodes) if real else None

    def seek(self, position: int, steps: int) -> int:
        """``steps`` times what all ranks take."""
        return min(position + steps * self.batch_size * self.num_ranks, self.total)

    def steps(self, position: int) -> int:
        """Whole steps of the longest range, and one more for a rest that is not dropped."""
        full, rest = divmod(max(self.total - position, 0), self.batch_size * self.num_ranks)
        return full + (rest > 0 and not self.drop_last)

    def run(self, position: int) -> int:
        """All steps that are full on every rank; none from the middle of a round, which only ends an epoch."""
        if position % self.num_nodes:
            return 0
        return max(self.total - position, 0) // (self.batch_size * self.num_ranks)

    def window(self, position: int, rank: int) -> None:
        """Every step stands for itself."""
        return


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The same global batches on any number of ranks.

    Global batch ``b`` is always positions ``b * global_batch`` and following. It is cut into as few micro-batches as
    keep every rank at ``batch_size`` rows or less, each of them into one part for each rank, as equal as they can be.
    A rank whose part is empty gets one row that counts nothing (``share`` 0.0), so that all ranks take part in every
    collective. Nothing is ever padded otherwise; the last global batch is just smaller, and weighs what it holds.
    """

    total: int
    batch_size: int
    num_ranks: int
    global_batch: int
    drop_last: bool = False

    def _window(self, position: int) -> tuple[int, int]:
        """First position of the global batch around ``position``, and the one past its last."""
        first = position // self.global_batch * self.global_batch
        return first, min(first + self.global_batch, self.total)

    def _parts(self, positions: int) -> int:
        """Micro-batches that ``positions`` positions are cut into."""
        return -(-positions // (self.batch_size * self.num_ranks))

    def rows(self, position: int, rank: int) -> Rows:
        """This rank's part of the first micro-batch of what is left of the global batch."""
        size = self.seek(position, 1) - position
        first, after = size * rank // self.num_ranks, size * (rank + 1) // self.num_ranks
        if first == after:
            return Rows(position, 1, 0)
        return Rows(position + first, after - first, after - first)

    def seek(self, position: int, steps: int) -> int:
        """Through the rest of this global batch, then whole ones, then into the last."""
        end = self._end
        left = steps
        while left and position < end:
            after = min(self._window(position)[1], end)
            parts = self._parts(after - position)
            if left < parts:
                # The longer micro-batches come first: so cut, the rest of a global batch is cut as the whole of it was.
                size, longer = divmod(after - position, parts)
                return position + left * size + min(left, longer)
            left -= parts
            position = after
            # Whole global batches all at once.
            whole = min(left // self._parts(self.global_batch), (end - position) // self.global_batch)
            left -= whole * self._parts(self.global_batch)
            position += whole * self.global_batch
        return position

    @property
    def _end(self) -> int:
        return self.total // self.global_batch * self.global_batch if self.drop_last else self.total

    def steps(self, position: int) -> int:
        """Micro-batches left."""
        end = self._end
        if position >= end:
            return 0
        after = min(self._window(position)[1], end)
        whole, rest = divmod(end - after, self.global_batch)
        return self._parts(after - position) + whole * self._parts(self.global_batch) + self._parts(rest)

    def run(self, position: int) -> int:
        """All global batches that are one micro-batch each."""
        if position % self.global_batch or self._parts(self.global_batch) > 1:
            return 0
        return max(self.total - position, 0) // self.global_batch

    def window(self, position: int, rank: int) -> Window:
        """Index 0 only where the global batch begins; the last micro-batch has index ``size`` - 1."""
        first, after = self._window(position)
        left = self._parts(after - position)
        done = max(self._parts(after - first) - left, 1) if position > first else 0
        share = self.num_ranks * self.rows(position, rank).real / (after - first)
        return Window(done, done + left, share)


def check_split(batch_size: int | None, num_ranks: int) -> int:
    """One rank's rows of a global batch of ``batch_size``; raises ``ConfigError`` when it cannot be cut equally."""
    if batch_size is None:
        raise ConfigError(
            "split_batches needs a known batch size, but the batch sampler has no batch_size; give it that attribute, "
            "or turn split_batches off so that every rank gets whole batches"
        )
    if batch_size % num_ranks:
        lower = batch_size // num_ranks * num_ranks
        nearest = f"{lower} or {lower + num_ranks}" if lower else f"{num_ranks}"
        raise ConfigError(
            f"with split_batches the batch size must be a round multiple of the number of processes: {batch_size} is "
            f"not a multiple of {num_ranks}; the nearest that work: {nearest}"
        )
    return batch_size // num_ranks
