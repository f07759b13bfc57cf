"""Lives through a step as a strategy would, and writes down the most memory that it takes; pure.

What follows here is when torch's ``fully_shard`` and DistributedDataParallel take memory and when they give it back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from accel_planner.profile.profile import Mark, ModelProfile, ParameterFact, Timeline


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a step takes beyond what is resident.

    Attributes:
        total: bytes of activations, gradients and communication together, at the worst moment.
        communication: the most bytes of gathered parameters and of buffers of collectives at any moment.
        gradients: bytes of the final gradients when backward has ended.
    """

    total: int
    communication: int
    gradients: int


def replay_replicated(timeline: Timeline, gradients: int, *, buckets: bool) -> Peak:
    """Every rank has all: gradients add up in backward, beside DDP's buckets if there are any."""
    held = gradients if buckets else 0
    total, made = held, 0
    for mark in timeline.marks:
        total = max(total, held + made + mark.highest)
        made += mark.amount
        total = max(total, held + made + mark.level)
    return Peak(total, held, gradients)


@final
@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Sizes of one unit of a sharded model on one rank.

    Attributes:
        gathered: its parameters whole, each padded to a multiple of the ranks, in the dtype that it computes in.
        cast: this rank's part in that dtype, where it is stored in another (or elsewhere).
        reduced: its gradients whole and padded, in the dtype in which they are summed.
        share: this rank's part of them.
        kept: that part in the dtype of the parameters; ``share`` if it is the same.
    """

    gathered: int
    cast: int
    reduced: int
    share: int
    kept: int


@final
@dataclass(frozen=True, slots=True)
class ShardedUnits:
    """How a step is carried out in shards.

    Attributes:
        shards: ranks that a parameter is spread over.
        keeps: units stay gathered between forward and backward.
        holds_reduced: replicas sum a copy in another dtype, which stays until backward ends.
        copies: collectives work on a copy of their buffers, as gloo's do.
        gradients_leave: gradients go to the host as soon as they are reduced.
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
    """Sizes of every unit.

    Args:
        compute: dtype that parameters are gathered in; None: their own.
        reduce: dtype that gradients are summed in; None: that of the gathered parameters.
        offloaded: shards have to be copied to the device first.
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
    """Units are gathered before they compute, and their gradients scattered after."""
    step = _ShardedStep(units, how)
    for mark in timeline.marks:
        step.pass_by(mark)
    return Peak(step.total, step.most, step.shares)


@final
class _ShardedStep:
    """What a rank holds at one moment of a sharded step."""

    def __init__(self, units: Sequence[UnitBytes], how: ShardedUnits) -> None:
        self.units = units
        self.how = how
        self.total = self.most = self.shares = 0
        self._level = 0
        self._whole: set[int] = set()  # units that are gathered
        self._fetched: set[int] = set()  # units of which the buffer of the collective is there
        self._behind = 0  # the buffer of forward's last gathering, kept until the next
        self._scattering = 0  # the input of the last reduction, kept until the next
        self._retained = 0
        self._gradients = [0] * len(units)
        self._order: list[int] = []  # units as forward left them
        self._left: set[int] = set()

    def pass_by(self, mark: Mark) -> None:
        """Lives on until this mark, then does what happens at it."""
        self._level = mark.level
        self._look(mark.highest - mark.level)
        if mark.kind == "enter":
            self._gather(mark.unit, forward=True)
        elif mark.kind == "exit":
            self._order.append(mark.unit)
            if mark.unit == 0:
                self._behind = 0
            elif not self.how.keeps:
                self._whole.discard(mark.unit)
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
            self._whole.clear()
            self._fetched.clear()
            self._scattering = self._retained = 0
        self._look()

    def _look(self, extra: int = 0) -> None:
        """Notes how much there is now, and ``extra`` for a moment."""
        buffers = sum(self.units[unit].gathered for unit in (*self._whole, *self._fetched))
        buffers += self._behind + self._scattering + self._retained
        shares = 0 if self.how.gradients_leave else self.shares
        self.total = max(self.total, self._level + buffers + sum(self._gradients) + shares + extra)
        self.most = max(self.most, buffers)

    def _fetch(self, unit: int) -> None:
        """Gathers into the collective's buffer."""
        size = self.units[unit]
        if self.how.shards > 1:
            self._fetched.add(unit)
            self._look(size.cast + (size.gathered if self.how.copies else 0))

    def _gather(self, unit: int, *, forward: bool) -> None:
        """Makes a unit's parameters whole, out of the collective's buffer."""
        if unit in self._whole:
            return
        size = self.units[unit]
        if unit not in self._fetched:
            self._fetch(unit)
        if forward:
            self._behind = 0
        self._whole.add(unit)
        self._look(size.cast if self.how.shards == 1 else 0)
        if unit in self._fetched:
            self._fetched.discard(unit)
            if forward:
                self._behind = size.gathered

    def _fetch_before(self, unit: int) -> None:
        """Fetches the unit that forward left before this one."""
        if unit not in self._order:
            return
        place = len(self._order) - 1 - self._order[::-1].index(unit)
        self._order.pop(place)
        if place > 0:
            before = self._order[place - 1]
            if before not in self._whole and before not in self._fetched:
                self._fetch(before)

    def _scatter(self, unit: int) -> None:
        """Frees a unit's parameters and makes its gradients this rank's share."""
        self._whole.discard(unit)
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
