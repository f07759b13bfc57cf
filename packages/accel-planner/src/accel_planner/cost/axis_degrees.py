"""Degrees of parallelism that divide a world size and a model; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

from accel_planner.cost.hardware import Hardware
from accel_planner.cost.transformer_shape import TransformerShape

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")
"""Axes of the mesh, outermost first."""

# Axes that one backend applies together: the pipeline backend, and the sharding backend without ``pp`` (ADR 20 to 23).
_TOGETHER = (
    frozenset({"pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"}),
    frozenset({"pp", "dp_replicate", "dp_shard", "ep", "sp", "tp"}),
)
SHORTEST = 8192
"""Fewest tokens of a sequence on each rank where a pipeline's stages shard sequences.

The cost model has no loss of efficiency in products of few tokens, without which shards of short sequences look free.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDegrees:
    """One degree for each axis of ``AXES``."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1

    def size(self, axis: str) -> int:
        """Degree of one axis."""
        degree: int = getattr(self, axis)
        return degree

    @property
    def active(self) -> tuple[str, ...]:
        """Axes of degrees above 1, outermost first."""
        return tuple([axis for axis in AXES if getattr(self, axis) > 1])  # the search reads it a million times

    @property
    def ranks(self) -> int:
        """World size."""
        return prod(map(self.size, AXES))

    @property
    def readers(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def shards(self) -> int:
        """Ranks over which parameters other than those of experts are sharded."""
        return self.dp_shard * self.ep * self.sequence

    @property
    def expert_shards(self) -> int:
        """Ranks over which the parameters of one rank's experts are sharded."""
        return self.dp_shard * self.sequence

    @property
    def sequence(self) -> int:
        """Ranks that have a part of each sequence."""
        return self.cp * self.sp

    def stride(self, axis: str) -> int:
        """Distance in ranks of neighbours along an axis."""
        return prod([getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :]])

    def is_local(self, axis: str, hardware: Hardware) -> bool:
        """Whether the groups of an axis stay inside a node."""
        return self.stride(axis) * self.size(axis) <= hardware.devices

    def __str__(self) -> str:
        return " x ".join(f"{axis}{self.size(axis)}" for axis in self.active) or "one rank"


def axis_degrees(
    shape: TransformerShape, hardware: Hardware, *, global_batch: int, micro_batch: int, length: int
) -> Iterator[AxisDegrees]:
    """Yields all degrees of the world size that divide the model and the batch, and that a backend applies together.

    Tensor-parallel ranks share a node, because they exchange activations within each block.
    """
    world = hardware.ranks
    for tp in (n for n in divisors(hardware.devices) if shape.groups % n == 0 and shape.feed_forward % n == 0):
        for pp in (n for n in divisors(world // tp) if n <= shape.layers):
            for cp, sp in _sequence_degrees(shape, world // (tp * pp), length, tp):
                inner = tp * pp * cp * sp
                if pp > 1 and cp * sp > 1 and length // (cp * sp) < SHORTEST:
                    continue
                for ep in (n for n in divisors(world // inner) if n == 1 or _divides(n, shape.experts)):
                    readers = world // inner
                    if global_batch % (readers * micro_batch):
                        continue
                    for shard in divisors(readers // ep):
                        found = AxisDegrees(
                            pp=pp, dp_replicate=readers // ep // shard, dp_shard=shard, ep=ep, cp=cp, sp=sp, tp=tp
                        )
                        if any(together.issuperset(found.active) for together in _TOGETHER):
                            yield found


def _sequence_degrees(shape: TransformerShape, ranks: int, length: int, tp: int) -> Iterator[tuple[int, int]]:
    """Degrees of context and sequence parallelism, of which one is 1.

    Context parallelism gives each rank two equal parts of a sequence, sequence parallelism one, and equally many heads.
    """
    for size in divisors(ranks):
        if size == 1 or length % (2 * size) == 0:
            yield size, 1
        if size > 1 and length % size == 0 and shape.heads % (size * tp) == 0:
            yield 1, size


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _divides(part: int, whole: int) -> bool:
    return whole > 0 and whole % part == 0
