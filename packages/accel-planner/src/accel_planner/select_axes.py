"""Proposal of degrees of parallelism: a combination that is fast and fits, and what is lost without each axis; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from accel_planner.cost.axis_degrees import AxisDegrees, axis_degrees
from accel_planner.cost.axis_plan import AxisPlan, Batching, accumulates, plan_degrees
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.transformer_shape import TransformerShape
from accel_planner.errors import PlanError
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes

_EXPLAINED = ("tp", "cp", "sp", "ep", "pp", "dp_shard")
TIE = 1.05
"""Of plans that differ by less than this factor in time, the one with the fewest model-parallel axes is preferred."""


@final
@dataclass(frozen=True, slots=True)
class AxisProposal:
    """The proposed degrees.

    Attributes:
        plan: the proposed plan, which fits.
        reasons: its memory, and for each of its axes what the best plan without the axis is.
        plans: all plans, the fastest first.
    """

    plan: AxisPlan
    reasons: tuple[str, ...]
    plans: tuple[AxisPlan, ...]


def plan_axes(shape: TransformerShape, hardware: Hardware, batching: Batching) -> list[AxisPlan]:
    """Plans all combinations of degrees, the fastest first.

    Each is planned with and without activation checkpointing, and with gradients that are reduced at the end of an
    accumulation window or in each of its micro-batches.

    Raises:
        ConfigError: no combination divides the world size, the model and the batch; names the nearest batch that does.
    """
    for name in ("global_batch", "micro_batch", "length"):
        if getattr(batching, name) < 1:
            raise ConfigError(f"{name} is {getattr(batching, name)}; expected at least 1")
    found = [
        plan_degrees(shape, hardware, degrees, batching, checkpointing=checkpointing, sync_each_batch=sync)
        for degrees in _degrees(shape, hardware, batching)
        for checkpointing in (False, True)
        for sync in ((False, True) if accumulates(degrees, batching) else (False,))
    ]
    if not found:
        raise ConfigError(
            f"global_batch={batching.global_batch} does not divide into micro-batches of {batching.micro_batch} on any "
            f"part of {hardware.ranks} ranks; nearest: global_batch={_nearest_batch(shape, hardware, batching)}"
        )
    return sorted(found, key=lambda plan: (plan.seconds, plan.peak, len(plan.degrees.active)))


def axes_document(
    shape: TransformerShape,
    hardware: Hardware,
    batching: Batching,
    plans: Iterable[AxisPlan],
    proposal: AxisProposal | None,
    problem: str | None,
    room: int,
) -> dict[str, Any]:
    """Returns all plans and the proposal as plain data, in bytes and seconds.

    Args:
        shape: the model.
        hardware: the devices.
        batching: the batches.
        plans: plans of ``plan_axes``.
        proposal: the proposal; None: nothing fits.
        problem: why nothing fits.
        room: bytes of a device that a plan may use.
    """
    return {
        "model": {**asdict(shape), "parameters": shape.numel},
        "hardware": asdict(hardware),
        "batch": asdict(batching),
        "plans": [{**asdict(plan), "name": plan.name, "peak": plan.peak, "fits": plan.peak <= room} for plan in plans],
        "choice": None if proposal is None else _choice(proposal),
        "problem": problem,
    }


def _choice(proposal: AxisProposal) -> dict[str, Any]:
    plan = proposal.plan
    return {
        "name": plan.name,
        "degrees": asdict(plan.degrees),
        "checkpointing": plan.checkpointing,
        "sync_each_batch": plan.sync_each_batch,
        "reasons": list(proposal.reasons),
    }


def _degrees(shape: TransformerShape, hardware: Hardware, batching: Batching) -> Iterator[AxisDegrees]:
    return axis_degrees(
        shape,
        hardware,
        global_batch=batching.global_batch,
        micro_batch=batching.micro_batch,
        length=batching.length,
    )


def _nearest_batch(shape: TransformerShape, hardware: Hardware, batching: Batching) -> int:
    """The global batch next to that of ``batching`` which some combination of degrees divides."""
    # A batch of micro-batches of all ranks is divided by every combination.
    every = replace(batching, global_batch=hardware.ranks * batching.micro_batch)
    steps = {degrees.readers * batching.micro_batch for degrees in _degrees(shape, hardware, every)}
    multiples = (max(1, round(batching.global_batch / step)) * step for step in steps)
    return min(multiples, key=lambda size: (abs(size - batching.global_batch), size))


def propose_axes(plans: Sequence[AxisPlan], hardware: Hardware, margin: float = 0.1) -> AxisProposal:
    """Chooses a plan that fits, and compares it with the best plan without each of its axes.

    It is the fastest one, or one with fewer model-parallel axes that is at most 5 % slower.

    ``margin``: fraction of each device's memory that stays free, from 0 and below 1.

    Raises:
        ConfigError: ``margin`` is no such fraction.
        PlanError: nothing fits; names the nearest plan and the bytes that it lacks.
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}; expected a fraction from 0 and below 1, like 0.1")
    room = int(hardware.memory * (1 - margin))
    plan = _best(plans, room)
    if plan is None:
        least = min(plans, key=lambda one: one.peak)
        raise PlanError(
            f"nothing fits {hardware} with a margin of {margin:.0%}. Nearest is {least.name}, which needs "
            f"{readable_bytes(least.peak)} per device, {readable_bytes(least.peak - room)} too much; more devices, a "
            "smaller micro-batch or shorter sequences would help"
        )
    reasons = [f"it needs {readable_bytes(plan.peak)} of {readable_bytes(room)}, and none that fits is over 5 % faster"]
    for axis in (axis for axis in _EXPLAINED if axis in plan.degrees.active):
        others = [other for other in plans if axis not in other.degrees.active]
        reasons.append(f"{axis}={plan.degrees.size(axis)}: {_without(axis, others, plan, room)}")
    if plan.sync_each_batch:
        others = [other for other in plans if not other.sync_each_batch]
        what = "gradients are reduced in each micro-batch (GradientAccumulationPlugin)"
        reasons.append(f"sync_each_batch=True: {what}; {_without('sync_each_batch', others, plan, room)}")
    return AxisProposal(plan, tuple(reasons), tuple(plans))


def _best(plans: Iterable[AxisPlan], room: int) -> AxisPlan | None:
    """The simplest of the plans that fit and are about as fast as the fastest of them; ``plans`` are sorted by time."""
    fitting = [plan for plan in plans if plan.peak <= room]
    near = [plan for plan in fitting if plan.seconds <= TIE * fitting[0].seconds]
    return min(near, key=lambda plan: len({*plan.degrees.active} - {"dp_replicate", "dp_shard"}), default=None)


def _without(axis: str, others: Sequence[AxisPlan], plan: AxisPlan, room: int) -> str:
    if not others:
        return f"without {axis} the ranks cannot be used"
    best = _best(others, room)
    if best is None:
        least = min(others, key=lambda one: one.peak)
        return f"without {axis} nothing fits; nearest is {least.name} with {readable_bytes(least.peak)}"
    return f"without {axis} the best is {best.name}, {best.seconds / plan.seconds:.2f} times as slow"
