"""Selection of a plan, with reasons, and the changes that would lead to another choice; pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from accel_planner.cost.plan import MemoryPlan
from accel_planner.errors import PlanError
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes

if TYPE_CHECKING:
    from accel_planner.cost.hardware import Hardware
    from accel_planner.profile.profile import ModelProfile

MARGIN = 0.1
"""Fraction of a device's memory that a plan leaves free: fragmentation, driver, libraries, estimation errors."""


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan and the reasons for it.

    Attributes:
        plan: the fastest plan that fits.
        reasons: reasons, in the order in which they were found.
        changes: what other choices would require.
        faster: plans that are faster and do not fit, the fastest first.
    """

    plan: MemoryPlan
    reasons: tuple[str, ...]
    changes: tuple[str, ...]
    faster: tuple[MemoryPlan, ...]

    def __str__(self) -> str:
        return f"{self.plan.candidate.name}: {'; '.join((*self.reasons, *self.changes))}"


def ranked(plans: Iterable[MemoryPlan]) -> list[MemoryPlan]:
    """Sorts plans by speed, then by communication volume, then in the given order (simplest first)."""
    return sorted(plans, key=lambda plan: (plan.seconds, plan.traffic.total))


def usable(memory: int, margin: float = MARGIN) -> int:
    """Bytes of a device that a plan may use."""
    return int(memory * (1 - margin))


def fits(plan: MemoryPlan, budget: int, margin: float = MARGIN) -> bool:
    """Returns whether a plan fits a device's memory, and its offloaded tensors fit the node's memory."""
    hosts = plan.hardware.host_memory
    return plan.peak <= usable(budget, margin) and (hosts is None or plan.host_of_node <= usable(hosts, margin))


def choose(plans: Iterable[MemoryPlan], budget: int | None = None, margin: float = MARGIN) -> Decision:
    """Chooses the fastest plan that fits.

    Args:
        plans: plans of one model on one hardware.
        budget: bytes of a device; None: the hardware's memory.
        margin: fraction of it to leave free.

    Raises:
        ConfigError: ``margin`` is no such fraction.
        PlanError: no plan fits; the message names the nearest one and the bytes that it lacks. Or there is no plan.
    """
    order = ranked(plans)
    if not order:
        raise PlanError("there is no plan to choose from")
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}; expected a fraction from 0 and below 1, like 0.1")
    budget = order[0].hardware.memory if budget is None else budget
    place = next((at for at, plan in enumerate(order) if fits(plan, budget, margin)), None)
    if place is None:
        raise PlanError(_nothing_fits(order, budget, margin))
    plan, faster = order[place], tuple(order[:place])
    room = usable(budget, margin)
    reasons = [
        f"it needs {readable_bytes(plan.peak)} of the {readable_bytes(room)} that {readable_bytes(budget)} leave with "
        f"a margin of {margin:.0%}"
    ]
    if faster:
        reasons.append(f"{len(faster)} faster {'one does' if len(faster) == 1 else 'ones do'} not fit")
    else:
        reasons.append("none is faster")
    return Decision(plan, tuple(reasons), _changes(plan, faster, budget, margin), faster)


def plan_document(
    profile: "ModelProfile",
    hardware: "Hardware",
    plans: Iterable[MemoryPlan],
    decision: Decision | None,
    problem: str | None,
    margin: float,
) -> dict[str, Any]:
    """Returns all plans and the choice as plain data, in bytes and seconds.

    Args:
        profile: the model.
        hardware: the devices.
        plans: plans of the model.
        decision: the choice; None: nothing fits.
        problem: why nothing fits.
        margin: fraction of the memory to leave free.
    """
    return {
        "model": {"name": profile.name, "parameters": profile.numel, "units": len(profile.units)},
        "precision": profile.policy.name,
        "hardware": asdict(hardware),
        "plans": [
            {
                "strategy": plan.candidate.name,
                "backend": plan.candidate.backend,
                "options": dict(plan.candidate.options),
                **asdict(plan.parts),
                "peak": plan.peak,
                "communicated": {**asdict(plan.traffic), "total": plan.traffic.total},
                "seconds": plan.seconds,
                "fits": fits(plan, hardware.memory, margin),
            }
            for plan in plans
        ],
        "choice": None
        if decision is None
        else {
            "strategy": decision.plan.candidate.name,
            "reasons": list(decision.reasons),
            "changes": list(decision.changes),
        },
        "problem": problem,
        "notes": list(profile.notes),
    }


def _changes(plan: MemoryPlan, faster: Iterable[MemoryPlan], budget: int, margin: float) -> tuple[str, ...]:
    """Device memory that each faster plan needs, ascending; plans that need more memory and are slower are left out."""
    found: list[str] = []
    best = plan.seconds
    for other in sorted(faster, key=lambda one: one.peak):
        if other.seconds >= best:
            continue
        best = other.seconds
        needed = _needed(other, margin) - budget
        if needed > 0:
            found.append(f"with {readable_bytes(needed, at_least=True)} more per device: {other.candidate.name}")
        else:
            host = readable_bytes(other.host_of_node)
            found.append(f"with {host} of host memory per node to offload to: {other.candidate.name}")
    return tuple(found)


def _needed(plan: MemoryPlan, margin: float) -> int:
    """Device memory with which a plan would fit."""
    return int(plan.peak / (1 - margin)) + 1


def _nothing_fits(order: list[MemoryPlan], budget: int, margin: float) -> str:
    least = min(order, key=lambda plan: plan.peak)
    over = least.peak - usable(budget, margin)
    parts = {
        "parameters": least.parts.parameters,
        "gradients": least.parts.gradients,
        "optimizer states": least.parts.optimizer,
        "activations": least.parts.activations,
        "communication": least.parts.communication,
    }
    largest = max(parts, key=lambda name: parts[name])
    if over <= 0:
        return (
            f"nothing fits the host memory of {readable_bytes(least.hardware.host_memory or 0)} per node: "
            f"{least.candidate.name} would offload {readable_bytes(least.host_of_node)} to it"
        )
    advice = (
        "a smaller batch or shorter sequences"
        if largest == "activations"
        else "more devices, or devices with more memory"
    )
    return (
        f"nothing fits {least.hardware} with a margin of {margin:.0%}. Nearest is {least.candidate.name}, which needs "
        f"{readable_bytes(least.peak)} per device, {readable_bytes(over)} too much; most of it is {largest} "
        f"({readable_bytes(parts[largest])}), so {advice} would help"
    )
