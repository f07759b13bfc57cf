"""Sharding: the positions of an epoch that each rank reads in each step, as pure functions.

A *step* is one batch on every rank. A sharding is a value that holds the batch size and the number of ranks; for the
step that begins at a position, it returns each rank's rows and the position after the step. Positions index the epoch's
order (``accel_data.order.orders``), so they are the same on any number of ranks.
"""

from dataclasses import dataclass
from typing import Protocol, final

from accel_data.order.cursor import Window
from accel_state.errors import ConfigError, DataError

UNKNOWN_TOTAL = 1 << 62
"""Length of an epoch whose end is not known yet."""


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` positions from ``first`` on, ``stride`` apart; the first ``real`` of them are new, the rest padding.

    Positions at or after the end of the epoch are padding; ``wrap`` returns the position whose sample is repeated
    there.
    """

    first: int
    count: int
    real: int
    stride: int = 1

    def positions(self) -> range:
        """Returns the positions, before padding is wrapped."""
        return range(self.first, self.first + self.count * self.stride, self.stride)


class Sharding(Protocol):
    """Division of an epoch of ``total`` positions into steps.

    A sharding of an epoch whose end is not known yet has ``total`` = ``UNKNOWN_TOTAL``.
    """

    @property
    def total(self) -> int:
        """Number of positions of the epoch."""

    def rows(self, position: int, rank: int) -> Rows | None:
        """Returns the rows of data rank ``rank`` in the step that begins at ``position``; None: it has no batch."""

    def seek(self, position: int, steps: int) -> int:
        """Returns the position ``steps`` steps after ``position``; at most ``total``."""

    def steps(self, position: int) -> int:
        """Returns the number of steps left at ``position``, over all ranks."""

    def run(self, position: int) -> int:
        """Returns the number of steps from here that equal this one up to a shift, to compute them all at once."""

    def window(self, position: int, rank: int) -> Window | None:
        """Returns the index of that step in its global batch, or None if the sharding has no global batches."""


def wrap(position: int, total: int, num_nodes: int = 1) -> int:
    """Returns the position whose sample pads ``position``: from the start of the epoch, within the same node."""
    if position < total:
        return position
    node, local = position % num_nodes, position // num_nodes
    length = total // num_nodes + (node < total % num_nodes)
    if not length:
        raise DataError(f"node {node} of {num_nodes} holds no sample of a dataset of {total}; use fewer nodes")
    return node + num_nodes * (local % length)


def batches_of(sharding: Sharding, position: int, rank: int) -> int:
    """Returns the number of batches of data rank ``rank`` from ``position`` to the end of the epoch."""
    steps = sharding.steps(position)
    if steps and sharding.rows(sharding.seek(position, steps - 1), rank) is None:
        return steps - 1
    return steps


def real_counts(sharding: Sharding, position: int, num_ranks: int) -> tuple[int, ...]:
    """Returns, by data rank, the number of real rows of its batch in the step at ``position``; -1: no batch."""
    shares = (sharding.rows(position, rank) for rank in range(num_ranks))
    return tuple(-1 if rows is None else rows.real for rows in shares)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByIndex:
    """Batches interleaved over the ranks: rank ``r`` reads the ``r``-th ``batch_size`` positions of every step.

    ``batch_size`` is that of one rank. ``even``: the last step is padded from the start of the epoch; otherwise ranks
    get a short batch or none in it. With one rank nothing is padded.
    """

    total: int
    batch_size: int
    num_ranks: int
    even: bool = True
    drop_last: bool = False

    def rows(self, position: int, rank: int) -> Rows | None:
        """Returns ``batch_size`` positions; fewer in the last step without ``even``."""
        first = position + rank * self.batch_size
        real = min(max(self.total - first, 0), self.batch_size)
        if self.even and self.num_ranks > 1:
            return Rows(first, self.batch_size, real)
        return Rows(first, real, real) if real else None

    def seek(self, position: int, steps: int) -> int:
        """Advances by ``steps`` times the batch size of all ranks."""
        return min(position + steps * self.batch_size * self.num_ranks, self.total)

    def steps(self, position: int) -> int:
        """Counts full steps, and one more for a rest that is not dropped."""
        full, rest = divmod(max(self.total - position, 0), self.batch_size * self.num_ranks)
        return full + (rest > 0 and not self.drop_last)

    def run(self, position: int) -> int:
        """Counts the steps that are full on every rank."""
        return max(self.total - position, 0) // (self.batch_size * self.num_ranks)

    def window(self, position: int, rank: int) -> None:
        """None: there are no global batches."""
        return


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByNode:
    """Shards by node: every rank reads from its node's contiguous range, whose batches the node's ranks interleave.

    Used with the ``NodeBlocks`` order, whose positions cycle over the nodes. Ranks of one node are neighbours.

    Raises:
        DataError: the number of ranks is not a multiple of the number of nodes.
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
        """Returns ``batch_size`` positions of the rank's node."""
        node, local_rank = divmod(rank, self.num_ranks // self.num_nodes)
        # A position that is not a multiple of the number of nodes occurs only at the end of an epoch.
        local = -(-position // self.num_nodes) + local_rank * self.batch_size
        length = self.total // self.num_nodes + (node < self.total % self.num_nodes)
        real = min(max(length - local, 0), self.batch_size)
        first = node + self.num_nodes * local
        if self.even and self.num_ranks > 1:
            return Rows(first, self.batch_size, real, self.num_nodes)
        return Rows(first, real, real, self.num_nodes) if real else None

    def seek(self, position: int, steps: int) -> int:
        """Advances by ``steps`` times the batch size of all ranks."""
        return min(position + steps * self.batch_size * self.num_ranks, self.total)

    def steps(self, position: int) -> int:
        """Counts full steps of the longest range, and one more for a rest that is not dropped."""
        full, rest = divmod(max(self.total - position, 0), self.batch_size * self.num_ranks)
        return full + (rest > 0 and not self.drop_last)

    def run(self, position: int) -> int:
        """Counts the steps that are full on every rank; 0 inside a cycle of the nodes, which occurs at the end only."""
        if position % self.num_nodes:
            return 0
        return max(self.total - position, 0) // (self.batch_size * self.num_ranks)

    def window(self, position: int, rank: int) -> None:
        """None: there are no global batches."""
        return


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The same global batches on any number of ranks.

    Global batch ``b`` always consists of the positions from ``b * global_batch`` on. It is split into the fewest
    micro-batches with at most ``batch_size`` rows per rank, and each micro-batch over the ranks as equally as possible.
    A rank without rows gets one row of weight zero (``share`` 0.0), so that all ranks take part in every collective.
    There is no other padding; the last global batch is smaller, and its weights follow its size.
    """

    total: int
    batch_size: int
    num_ranks: int
    global_batch: int
    drop_last: bool = False

    def _window(self, position: int) -> tuple[int, int]:
        """Returns the first position of the global batch around ``position``, and the position after its last."""
        first = position // self.global_batch * self.global_batch
        return first, min(first + self.global_batch, self.total)

    def _parts(self, positions: int) -> int:
        """Returns the number of micro-batches for ``positions`` positions."""
        return -(-positions // (self.batch_size * self.num_ranks))

    def rows(self, position: int, rank: int) -> Rows:
        """Returns this rank's rows of the first micro-batch of the rest of the global batch."""
        size = self.seek(position, 1) - position
        first, after = size * rank // self.num_ranks, size * (rank + 1) // self.num_ranks
        if first == after:
            return Rows(position, 1, 0)
        return Rows(position + first, after - first, after - first)

    def seek(self, position: int, steps: int) -> int:
        """Advances through the rest of this global batch, then over full ones, then into the last."""
        end = self._end
        left = steps
        while left and position < end:
            after = min(self._window(position)[1], end)
            parts = self._parts(after - position)
            if left < parts:
                # Longer micro-batches come first, so that the rest of a global batch is split as the full one was.
                size, longer = divmod(after - position, parts)
                return position + left * size + min(left, longer)
            left -= parts
            position = after
            # All full global batches at once.
            whole = min(left // self._parts(self.global_batch), (end - position) // self.global_batch)
            left -= whole * self._parts(self.global_batch)
            position += whole * self.global_batch
        return position

    @property
    def _end(self) -> int:
        return self.total // self.global_batch * self.global_batch if self.drop_last else self.total

    def steps(self, position: int) -> int:
        """Counts the micro-batches left."""
        end = self._end
        if position >= end:
            return 0
        after = min(self._window(position)[1], end)
        whole, rest = divmod(end - after, self.global_batch)
        return self._parts(after - position) + whole * self._parts(self.global_batch) + self._parts(rest)

    def run(self, position: int) -> int:
        """Counts the global batches left if each is one micro-batch."""
        if position % self.global_batch or self._parts(self.global_batch) > 1:
            return 0
        return max(self.total - position, 0) // self.global_batch

    def window(self, position: int, rank: int) -> Window:
        """Returns the window; index 0 only at the start of a global batch, ``size`` - 1 for the last micro-batch."""
        first, after = self._window(position)
        left = self._parts(after - position)
        done = max(self._parts(after - first) - left, 1) if position > first else 0
        share = self.num_ranks * self.rows(position, rank).real / (after - first)
        return Window(done, done + left, share)


def check_split(batch_size: int | None, num_ranks: int) -> int:
    """Returns ``batch_size // num_ranks``; raises ``ConfigError`` if ``num_ranks`` does not divide ``batch_size``."""
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
