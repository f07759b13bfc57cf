"""Memory of DeepSpeed's ZeRO, as engines prepared here take it; pure.

What is stored, accumulated and kept by the optimizer is counted to the byte, and measured on CPU ranks. When buffers
come and go follows DeepSpeed's documented defaults, sized as preparing sizes them: no larger than the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

from accel_planner.cost.hardware import Hardware
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile, ParameterFact, Timeline

if TYPE_CHECKING:
    from accel_planner.candidate import Candidate
    from accel_planner.cost.model import Parts

# DeepSpeed's defaults, in numbers and not bytes.
BUCKET = 500_000_000
MAX_LIVE = 1_000_000_000
PERSISTENT = 100_000  # smaller parameters stay gathered at stage 3
MASTER = torch.float32
# Groups are padded so that each rank's part starts where transfers like it.
_ALIGNMENT = 2


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one rank that stay from step to step, and of buffers that come and go.

    Attributes:
        parameters: as the model computes with them; at stage 3 this rank's parts, and small ones whole.
        gradients: after backward.
        states: fp32 copies of this rank's part, if there are any, and the optimizer's states of it.
        fed: gradients as an optimizer on the host takes them; part of ``gradients`` and ``reserved``.
        reserved: what of gradients and buffers is made once and stays.
        bucket: gradients on their way; at stages 1 and 2 made by the first one of a backward.
        gathered: most of other ranks' parameters that are here at once.
        reduced: what reducing takes besides.
    """

    parameters: int
    gradients: int
    states: int
    fed: int
    reserved: int
    bucket: int
    gathered: int
    reduced: int


def plan_zero(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: "Candidate"
) -> "tuple[Parts, int]":
    """Stage 1 partitions fp32 copies and optimizer states, 2 gradients as well, 3 parameters as well.

    Models are held in the dtype that they compute in; the optimizer steps on an fp32 copy of this rank's part, or, at
    stages 1 and 2 in fp32 without offloading, on the model's own memory.
    """
    from accel_planner.cost.model import Parts

    timeline = profile.timeline(native=True, checkpointed=candidate.checkpointing)
    sizes = _sizes(profile, optimizer, hardware, candidate)
    flat = ParameterFact("", (_part(sum(p.numel for p in profile.trainable), hardware.ranks),), MASTER, True, 0)
    step = round(flat.nbytes * max(optimizer.scratch.values(), default=0.0))
    other = profile.buffers + profile.inputs
    parameters, gradients, states, reserved = sizes.parameters, sizes.gradients, sizes.states, sizes.reserved
    host = 0
    if candidate.offload and hardware.kind != "cpu":
        host, states, step = states + sizes.fed, 0, 0
        gradients, reserved = gradients - sizes.fed, reserved - sizes.fed
        if candidate.stage == 3:
            host, parameters = host + parameters, 0
        if candidate.stage > 1:
            host, gradients, reserved = host + gradients, 0, reserved - gradients
    moving = max(_moments(timeline, profile, sizes))
    stepping = (0 if candidate.stage == 3 else sizes.bucket + flat.nbytes) + step
    communication = sizes.bucket + sizes.gathered + sizes.reduced
    parts = Parts(parameters, gradients, states, timeline.activations, communication, other, step, host)
    return parts, parameters + states + reserved + other + max(moving, stepping)


def _sizes(profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: "Candidate") -> Sizes:
    ranks, stage = hardware.ranks, candidate.stage
    compute = profile.policy.compute
    held = [_held(parameter, compute) for parameter in profile.parameters]
    trained = [parameter for parameter in held if parameter.trainable]
    numel = sum(parameter.numel for parameter in trained)
    width = max((parameter.dtype.itemsize for parameter in trained), default=MASTER.itemsize)
    wide = max(width, MASTER.itemsize)  # gradients travel and, from stage 2 on, add up in fp32
    bucket = min(BUCKET, numel + numel % 2)
    copies = hardware.kind == "cpu" and ranks > 1  # gloo's collectives work on a copy
    if stage == 3:
        part = sum(_part(parameter.numel, ranks) for parameter in trained)
        small = sum(parameter.nbytes for parameter in held if parameter.numel <= PERSISTENT and ranks > 1)
        whole = sum(parameter.nbytes for parameter in held)
        parameters = sum(_part(parameter.numel, ranks) * parameter.dtype.itemsize for parameter in held) + small
        gathered = min(MAX_LIVE * width, whole - small) if ranks > 1 else 0
        reduced = part * wide + (bucket * wide if copies else 0)
        gradients, reserved = part * wide, part * wide + bucket * wide
    else:
        padded = numel + -numel % (_ALIGNMENT * ranks)
        part = padded // ranks
        frozen = sum(parameter.nbytes for parameter in held if not parameter.trainable)
        parameters, gathered = padded * width + frozen, 0
        bucket_width = width if stage == 1 and not candidate.offload else wide
        gradients = numel * bucket_width if stage == 1 else _kept(trained, part, ranks, halves=width < wide)
        reserved = gradients if stage == 2 and candidate.offload else 0
        reduced = (bucket * wide if copies or width < wide else 0) + (part * wide if width < wide else 0)
    fed = part * MASTER.itemsize if candidate.offload else 0
    shared = stage < 3 and width == MASTER.itemsize and not candidate.offload
    copied = 0 if shared else part * MASTER.itemsize
    states = copied + _flat_states(optimizer, profile, part)
    buffer = 0 if stage == 3 else bucket * bucket_width
    return Sizes(parameters, gradients + fed, states, fed, reserved + fed, buffer, gathered, reduced)


def _kept(trained: Sequence[ParameterFact], part: int, ranks: int, *, halves: bool) -> int:
    """Gradients of stage 2 on the fullest rank: its part, or whole ones of all parameters that it has a part of."""
    if halves:
        return part * MASTER.itemsize
    most = 0
    for rank in range(ranks):
        start, mine = 0, 0
        for parameter in trained:
            end = start + parameter.numel
            if start < (rank + 1) * part and end > rank * part:
                mine += parameter.nbytes
            start = end
        most = max(most, mine)
    return most


def _moments(timeline: Timeline, profile: ModelProfile, sizes: Sizes) -> Iterator[int]:
    """What is there beyond what stays, at each mark of a step and while gradients are reduced."""
    largest = max((parameter.nbytes for parameter in profile.trainable), default=0)
    backward = 0
    for mark in timeline.marks:
        if mark.kind == "gradient" and not backward:
            backward = sizes.bucket + largest
        yield mark.highest + sizes.gathered + backward
    yield sizes.bucket + sizes.gathered + sizes.reduced


def _held(parameter: ParameterFact, compute: torch.dtype | None) -> ParameterFact:
    floating = parameter.dtype.is_floating_point
    return replace(parameter, dtype=compute) if compute is not None and floating else parameter


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _flat_states(optimizer: OptimizerFacts, profile: ModelProfile, part: int) -> int:
    """States of the flat part: as many for each number as the optimizer keeps in the parameters' own shape."""
    if not profile.trainable:
        return 0
    first = profile.trainable[0]
    states = optimizer.states[len(first.shape), first.dtype.itemsize]
    return sum(part * (state.itemsize or MASTER.itemsize) for state in states if state.like)
