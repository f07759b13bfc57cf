"""Memory of DeepSpeed's ZeRO, by its own account of what it partitions; pure.

Not measured here, unlike the other candidates: the arithmetic follows DeepSpeed's documented defaults.
"""

from typing import TYPE_CHECKING

import torch

from accel.planner.hardware import Hardware
from accel.planner.optimizers import OptimizerFacts
from accel.planner.profile import ModelProfile, ParameterFact

if TYPE_CHECKING:
    from accel.planner.candidate import Candidate
    from accel.planner.memory import Parts

# DeepSpeed's defaults, in numbers and not bytes.
REDUCE_BUCKET = GATHER_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
MAX_LIVE = 1_000_000_000
MASTER = torch.float32


def plan_zero(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: "Candidate"
) -> "tuple[Parts, int]":
    """Stage 1 partitions fp32 copies and optimizer states, 2 gradients as well, 3 parameters as well.

    Models are held in the dtype that they compute in; the optimizer steps on an fp32 copy of this rank's part.
    """
    from accel.planner.memory import Parts

    ranks, stage = hardware.ranks, candidate.stage
    compute = profile.policy.compute
    timeline = profile.timeline(native=True, checkpointed=candidate.checkpointing)
    half = [_held(parameter, compute) for parameter in profile.parameters]
    parameters = sum(_part(parameter.nbytes, ranks if stage == 3 else 1) for parameter in half)
    trained = [_held(parameter, compute) for parameter in profile.trainable]
    numel = sum(parameter.numel for parameter in trained)
    width = max((parameter.dtype.itemsize for parameter in trained), default=4)
    gradients = sum(_part(parameter.nbytes, ranks if stage > 1 else 1) for parameter in trained)
    flat = ParameterFact("", (_part(numel, ranks),), MASTER, True, 0)
    master = flat.nbytes
    states = master + _flat_states(optimizer, profile, flat)
    bucket = min(REDUCE_BUCKET, numel) * width
    gathered = 0
    if stage == 3:
        bucket *= 2  # overlap is on by default in this stage
        gathered = min(MAX_LIVE, _largest_unit(profile) + PREFETCH_BUCKET, numel) * width
    elif ranks > 1:
        gathered = min(GATHER_BUCKET, numel) * width  # of the updated parameters, after the step
    step = master  # this rank's gradients as the optimizer takes them
    other = profile.buffers + profile.inputs
    host = 0
    if candidate.offload and hardware.kind != "cpu":
        host, states, step = states + step, 0, 0
        if stage == 3:
            host, parameters = host + parameters, 0
        if stage > 1:
            host, gradients = host + gradients, 0
    moving = parameters + gradients + states + other + bucket + (gathered if stage == 3 else 0) + timeline.activations
    stepping = parameters + gradients + states + other + step + (gathered if stage < 3 else 0)
    communication = bucket + gathered
    parts = Parts(parameters, gradients, states, timeline.activations, communication, other, step, host)
    return parts, max(moving, stepping)


def _held(parameter: ParameterFact, compute: torch.dtype | None) -> ParameterFact:
    from dataclasses import replace

    floating = parameter.dtype.is_floating_point
    return replace(parameter, dtype=compute) if compute is not None and floating else parameter


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _flat_states(optimizer: OptimizerFacts, profile: ModelProfile, flat: ParameterFact) -> int:
    """States of the flat part: as many for each number as the optimizer keeps in the parameters' own shape."""
    if not profile.trainable:
        return 0
    first = profile.trainable[0]
    states = optimizer.states[len(first.shape), first.dtype.itemsize]
    return sum(flat.numel * (state.itemsize or MASTER.itemsize) for state in states if state.like)


def _largest_unit(profile: ModelProfile) -> int:
    sizes = [0] * len(profile.units)
    for parameter in profile.parameters:
        sizes[parameter.unit] += parameter.numel
    return max(sizes)
