"""Report of a step that one rank of many took alone: its memory, and its collectives by kind and axis."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from accel_state.parallelism.config import MESH_AXES
from accel_state.sizes import readable_bytes

if TYPE_CHECKING:
    from accel_observe.profiling.held_memory import HeldMemory
    from accel_state import ParallelismConfig
    from accel_state.process_group.fake_group import CountedCollective

ALONE, EVERY, SOME = "this rank", "all ranks", "some ranks"


@final
@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Collectives of one kind along the same axes of the mesh.

    Attributes:
        kind: name of the collective.
        axis: axes along which the ranks of the group differ, outermost first; without a mesh, "all ranks" or
            "some ranks".
        ranks: size of the group.
        calls: number of calls.
        bytes: bytes that this rank passed to them; for "recv", bytes that it receives.
    """

    kind: str
    axis: str
    ranks: int
    calls: int
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank of many after its first optimizer step; ``str`` is for people, ``to_dict`` for programs.

    Attributes:
        rank: the rank.
        world_size: ranks of the run.
        backend: the chosen backend.
        reasons: why it was chosen.
        axes: sizes of the mesh's axes above 1, outermost first.
        memory: bytes after the optimizer's step, before gradients are cleared.
        peak: highest sum of all tensors within the step, in bytes; None: not measured.
        setup: collectives before the first forward of training.
        step: collectives of the step.
        notes: what a reader should know about the numbers.
    """

    rank: int
    world_size: int
    backend: str
    reasons: tuple[str, ...]
    axes: dict[str, int]
    memory: "HeldMemory"
    peak: int | None
    setup: tuple[AxisTraffic, ...]
    step: tuple[AxisTraffic, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values."""
        return asdict(self)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes.items()) or "no axis"
        held = self.memory
        parts = {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "buffers": held.buffers,
            "reserved": held.reserved,
        }
        lines = [
            f"rank {self.rank} of {self.world_size}, backend {self.backend}: {'; '.join(self.reasons)}",
            f"mesh: {mesh}",
            f"memory: {', '.join(f'{name} {readable_bytes(size)}' for name, size in parts.items() if size)}",
            "peak of the step: " + ("not measured" if self.peak is None else readable_bytes(self.peak)),
        ]
        for title, rows in (("setup", self.setup), ("step", self.step)):
            lines.append(f"{title}: {'no collective' if not rows else 'collectives, and bytes from this rank'}")
            lines += _lines(rows)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _lines(rows: Sequence[AxisTraffic]) -> Iterable[str]:
    names = [f"{row.kind} over {row.axis} ({row.ranks} ranks)" for row in rows]
    width = max(map(len, names), default=0)
    for name, row in zip(names, rows, strict=True):
        yield f"  {name:<{width}}  {row.calls:>6} calls  {readable_bytes(row.bytes):>11}"


def axis_of(ranks: Sequence[int], degrees: "ParallelismConfig", world_size: int) -> str:
    """Names the axes along which the ranks of a group differ; "all ranks" or "some ranks" without a mesh of them."""
    if len(ranks) == 1:
        return ALONE
    if degrees.total_size != world_size:
        return EVERY if len(ranks) == world_size else SOME
    places = [degrees.coordinates(rank) for rank in ranks]
    differing = [axis for axis in MESH_AXES if len({place[axis] for place in places}) > 1]
    return " x ".join(differing)


def by_axis(
    counted: Iterable["CountedCollective"], degrees: "ParallelismConfig", world_size: int
) -> tuple[AxisTraffic, ...]:
    """Sums collectives of one kind over groups along the same axes, those with the most bytes first."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for one in counted:
        key = one.kind, axis_of(one.ranks, degrees, world_size), len(one.ranks)
        found = sums.setdefault(key, [0, 0])
        found[0] += one.calls
        found[1] += one.bytes
    rows = (AxisTraffic(*key, calls, size) for key, (calls, size) in sums.items())
    return tuple(sorted(rows, key=lambda row: -row.bytes))
