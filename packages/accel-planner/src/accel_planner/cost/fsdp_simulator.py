"""FSDP memory simulator: replays a step's timeline with sharded units and records the peak memory; pure.

Models when torch's ``fully_shard`` allocates and frees memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from accel_planner.profile.profile import Mark, ModelProfile, ParameterFact, Timeline


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of a step beyond the resident parameters and optimizer states.

    Attributes:
        total: peak bytes of activations, gradients and communication buffers together.
        communication: peak bytes of gathered parameters and collective buffers.
    """

    total: int
    communication: int


@final
@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Sizes in bytes of one FSDP unit on one rank.

    Attributes:
        gathered: full parameters, each padded to a multiple of the shard degree, in the compute dtype.
        cast: this rank's shard in the compute dtype, if it is stored in another dtype or in host memory.
        reduced: full padded gradients in the dtype of the reduction.
        share: this rank's shard of those gradients.
        kept: that shard in the dtype of the parameters; equals ``share`` if the dtypes are the same.
    """

    gathered: int
    cast: int
    reduced: int
    share: int
    kept: int


@final
@dataclass(frozen=True, slots=True)
class ShardedUnits:
    """Execution of a step with sharded units: what is sharded, kept and copied.

    Attributes:
        shards: shard degree.
        keeps: units stay gathered between forward and backward.
        holds_reduced: replicas all-reduce a copy in another dtype, which is kept until the backward ends.
        copies: collectives copy their buffers, as gloo's do.
        gradients_leave: gradients are moved to host memory as soon as they are reduced.
    """

    shards: int
    keeps: bool
    holds_reduced: bool = False
    copies: bool = False
    gradients_leave: bool = False


def unit_bytes(
    profile: ModelProfile,
    shards: int,
    *,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
    offloaded: bool = False,
) -> list[UnitBytes]:
    """Returns the sizes of every unit.

    Args:
        compute: dtype in which parameters are gathered; None: their own.
        reduce: dtype in which gradients are reduced; None: that of the gathered parameters.
        offloaded: shards must be copied to the device first.
    """
    sizes: list[list[int]] = [[0] * 5 for _ in profile.units]
    for parameter in profile.parameters:
        if not parameter.sharded:
            continue
        part = parameter.shard_numel(shards)
        dtype = _gathered_dtype(profile, parameter, compute)
        size = sizes[parameter.unit]
        size[0] += shards * part * dtype.itemsize
        if offloaded:
            size[1] += part * parameter.dtype.itemsize
        if dtype != parameter.dtype:
            size[1] += part * dtype.itemsize
        if parameter.trainable:
            summed = reduce or dtype
            size[2] += shards * part * summed.itemsize
            size[3] += part * summed.itemsize
            size[4] += part * parameter.dtype.itemsize
    return [UnitBytes(*size) for size in sizes]


def _gathered_dtype(profile: ModelProfile, parameter: ParameterFact, compute: torch.dtype | None) -> torch.dtype:
    if compute is None or parameter.unit in profile.wide or not parameter.dtype.is_floating_point:
        return parameter.dtype
    return compute


def replay_sharded(timeline: Timeline, units: Sequence[UnitBytes], how: ShardedUnits) -> Peak:
    """Replays a sharded step: units are all-gathered before they compute, and gradients reduce-scattered afterwards."""
    step = _ShardedStep(units, how)
    for mark in timeline.marks:
        step.pass_by(mark)
    return Peak(step.total, step.most)


@final
class _ShardedStep:
    """Simulated memory of one rank during a sharded step."""

    def __init__(self, units: Sequence[UnitBytes], how: ShardedUnits) -> None:
        self.units = units
        self.how = how
        self.total = self.most = self.shares = 0
        self._level = 0
        self._full: set[int] = set()  # units whose full parameters are allocated
        self._fetched: set[int] = set()  # units whose all-gather buffer is allocated
        self._behind = 0  # buffer of the forward's last all-gather, kept until the next one
        self._scattering = 0  # input of the last reduce-scatter, kept until the next one
        self._retained = 0
        self._gradients = [0] * len(units)
        self._order: list[int] = []  # units in the order in which the forward left them
        self._left: set[int] = set()

    def pass_by(self, mark: Mark) -> None:
        """Updates the peak with the memory up to this mark, then applies the mark's event."""
        self._level = mark.level
        self._look(mark.highest - mark.level)
        if mark.kind == "enter":
            self._gather(mark.unit, forward=True)
        elif mark.kind == "exit":
            self._order.append(mark.unit)
            if mark.unit == 0:
                self._behind = 0
            elif not self.how.keeps:
                self._full.discard(mark.unit)
        elif mark.kind == "reenter":
            self._gather(mark.unit, forward=False)
            self._fetch_before(mark.unit)
        elif mark.kind == "gradient":
            self._gradients[mark.unit] += mark.amount
        elif mark.kind == "leave":
            self._scatter(mark.unit)
        else:
            for unit in range(len(self.units)):
                self._scatter(unit)
            self._full.clear()
            self._fetched.clear()
            self._scattering = self._retained = 0
        self._look()

    def _look(self, extra: int = 0) -> None:
        """Updates the peaks with the current memory plus ``extra`` temporary bytes."""
        buffers = sum(self.units[unit].gathered for unit in (*self._full, *self._fetched))
        buffers += self._behind + self._scattering + self._retained
        shares = 0 if self.how.gradients_leave else self.shares
        self.total = max(self.total, self._level + buffers + sum(self._gradients) + shares + extra)
        self.most = max(self.most, buffers)

    def _fetch(self, unit: int) -> None:
        """All-gathers a unit into a collective buffer."""
        size = self.units[unit]
        if self.how.shards > 1:
            self._fetched.add(unit)
            self._look(size.cast + (size.gathered if self.how.copies else 0))

    def _gather(self, unit: int, *, forward: bool) -> None:
        """Allocates a unit's full parameters and copies them out of the all-gather buffer."""
        if unit in self._full:
            return
        size = self.units[unit]
        if unit not in self._fetched:
            self._fetch(unit)
        if forward:
            self._behind = 0
        self._full.add(unit)
        self._look(size.cast if self.how.shards == 1 else 0)
        if unit in self._fetched:
            self._fetched.discard(unit)
            if forward:
                self._behind = size.gathered

    def _fetch_before(self, unit: int) -> None:
        """Prefetches, for the backward, the unit that the forward left before this one."""
        if unit not in self._order:
            return
        place = len(self._order) - 1 - self._order[::-1].index(unit)
        self._order.pop(place)
        if place > 0:
            before = self._order[place - 1]
            if before not in self._full and before not in self._fetched:
                self._fetch(before)

    def _scatter(self, unit: int) -> None:
        """Frees a unit's full parameters and reduce-scatters its gradients."""
        self._full.discard(unit)
        size, mine = self.units[unit], self._gradients[unit]
        if not mine or unit in self._left:
            return
        self._left.add(unit)
        self._scattering = size.reduced
        self._look()
        self._gradients[unit] = 0
        self.shares += size.kept
        other = size.share if size.share != size.kept else 0
        self._look(other + (size.reduced if self.how.copies else 0))
        if self.how.holds_reduced and other:
            self._retained += size.share
