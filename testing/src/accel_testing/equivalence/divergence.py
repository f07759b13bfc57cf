"""Divergence report: the first step at which a layout's runs leave those of one process, and all differences there."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from accel_testing.equivalence.compare import TensorDifference, compare_trees, largest
from accel_testing.equivalence.training import TrainedStep

# Losses and norms subtract nearly equal numbers, so they lose precision first.
_SCALAR_SLACK = 10.0
# A loss or norm is measured relative to itself, but to no less than this fraction of the largest in the run.
_PASSING = 1e-2
# A tensor is measured relative to its largest element in the run, but to no less than this fraction of the largest
# tensor's.
_SMALL = 1e-3


@final
@dataclass(frozen=True, slots=True)
class Departure:
    """Divergence of a layout from the reference: the step (from 0), and one sentence for each difference.

    ``tensors`` differ at that step, the farthest first.
    """

    step: int
    reasons: tuple[str, ...]
    tensors: tuple[TensorDifference, ...] = ()

    def __str__(self) -> str:
        lines = [f"leaves the one-process reference at step {self.step}:", *(f"  {reason}" for reason in self.reasons)]
        if self.tensors:
            lines.append(f"  {self.tensors[0]}")
            if more := len(self.tensors) - 1:
                lines.append(f"  and {more} more tensor{'s' if more > 1 else ''}")
        return "\n".join(lines)


def compare_runs(
    reference: Sequence[TrainedStep], runs: Sequence[Sequence[TrainedStep]], *, tolerance: float
) -> Departure | None:
    """The first step at which the ranks' runs differ from the reference, or None; ``runs`` are by rank.

    A reference with a loss or a gradient norm that is not a number is a departure, because it proves nothing.
    """
    for position, expected in enumerate(reference):
        if math.isnan(expected.loss) or math.isnan(expected.norm):
            said = f"the loss of the reference is {expected.loss:.10g}, and its gradient norm {expected.norm:.10g}"
            return Departure(position, (f"{said}: there is nothing to equal",))
    scales = _scales(reference)
    for position, expected in enumerate(reference):
        steps = [run[position] for run in runs if position < len(run)]
        if len(steps) < len(runs):
            counts = ", ".join(str(len(run)) for run in runs)
            return Departure(position, (f"the ranks took {counts} optimizer steps, the reference {len(reference)}",))
        if departure := _compare_step(position, expected, steps, tolerance=tolerance, scales=scales):
            return departure
    if any(len(run) > len(reference) for run in runs):
        counts = ", ".join(str(len(run)) for run in runs)
        return Departure(len(reference), (f"the ranks took {counts} optimizer steps, the reference {len(reference)}",))
    return None


def _compare_step(
    position: int, expected: TrainedStep, steps: Sequence[TrainedStep], *, tolerance: float, scales: "_Scales"
) -> Departure | None:
    reasons = []
    if skipped := [rank for rank, step in enumerate(steps) if step.skipped]:
        reasons.append(f"the optimizer step was skipped on ranks {skipped}, because gradients overflowed")
    reasons += _compare_losses(expected, steps, slack=tolerance * _SCALAR_SLACK, scale=scales.loss)
    norm, was = steps[0].norm, expected.norm
    if not abs(norm - was) <= tolerance * _SCALAR_SLACK * max(was, scales.norm):
        reasons.append(f"the gradient norm is {norm:.10g} instead of {was:.10g}{_ratio(norm, was)}")
    if steps[0].rates != expected.rates:
        reasons.append(f"the learning rates are {list(steps[0].rates)} instead of {list(expected.rates)}")
    reasons += _disagreements(steps)
    tensors = compare_trees(steps[0].tensors, expected.tensors, rtol=tolerance, scales=scales.tensors)
    if not reasons and not tensors:
        return None
    return Departure(position, tuple(reasons), tuple(sorted(tensors, key=lambda one: (not one.reason, -one.relative))))


def _compare_losses(
    expected: TrainedStep, steps: Sequence[TrainedStep], *, slack: float, scale: float
) -> Iterator[str]:
    weight = sum(step.weight for step in steps)
    loss, was = _mean(sum(step.loss for step in steps), weight), _mean(expected.loss, expected.weight)
    if not abs(loss - was) <= slack * max(abs(was), scale):
        yield f"the loss is {loss:.10g} instead of {was:.10g}"
    # Ranks of one tensor, context or pipeline parallel group see the same samples, so each sample is counted that many
    # times.
    peers = max(1, round(weight / expected.weight)) if expected.weight else 1
    if abs(weight - expected.weight * peers) > 1e-9 * weight:
        yield f"the ranks saw samples of weight {weight:g} instead of {expected.weight:g}"


@final
@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales relative to which distances are measured: magnitudes over the full reference run.

    A bias that passes through zero at one step has no meaningful relative error there, and one that stays near zero is
    noise.
    """

    loss: float
    norm: float
    tensors: Mapping[str, float]


def _scales(reference: Sequence[TrainedStep]) -> _Scales:
    tensors = {
        name: max(largest(step.tensors[name].double()) for step in reference)
        for name, value in reference[0].tensors.items()
        if value.is_floating_point()
    }
    floor = max(tensors.values(), default=0.0) * _SMALL
    return _Scales(
        loss=max(abs(_mean(step.loss, step.weight)) for step in reference) * _PASSING,
        norm=max(step.norm for step in reference) * _PASSING,
        tensors={name: max(scale, floor) for name, scale in tensors.items()},
    )


def _mean(total: float, weight: float) -> float:
    """The mean of a total; the total itself if nothing was counted, as where all tokens of a step are ignored."""
    return total / weight if weight else total


def _ratio(value: float, expected: float) -> str:
    """Names a factor near an integer, or its inverse, because it indicates a wrong divisor."""
    if not value or not expected:
        return ""
    for whole in range(2, 65):
        for factor, text in ((float(whole), f"{whole} times"), (1.0 / whole, f"1/{whole} of")):
            if abs(value / expected / factor - 1) < 1e-3:
                return f" ({text} it)"
    return ""


def _disagreements(steps: Sequence[TrainedStep]) -> list[str]:
    """Parameters whose bits on other ranks differ from those on rank 0: replicas that have diverged."""
    first = steps[0].digests
    found = []
    for rank, step in enumerate(steps[1:], 1):
        if apart := [name for name, digest in step.digests.items() if first.get(name) != digest]:
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            found.append(f"rank {rank} has another {apart[0]}{more} than rank 0")
    return found


def distance_of(reference: Sequence[TrainedStep], run: Sequence[TrainedStep]) -> float:
    """The largest relative distance of any tensor after the last step; infinite for a run without steps."""
    if not run:
        return float("inf")
    found = compare_trees(run[-1].tensors, reference[-1].tensors, rtol=0.0, scales=_scales(reference).tensors)
    return max((one.relative for one in found), default=0.0)
