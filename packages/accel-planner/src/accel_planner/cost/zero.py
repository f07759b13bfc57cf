"""Cost model of DeepSpeed's ZeRO, for engines as accel prepares them; pure.

Stored parameters, accumulated gradients and optimizer states are exact to the byte, verified on CPU ranks. Temporary
buffers follow DeepSpeed's documented defaults, capped at the size of the model as accel's prepare caps them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch.optim import Optimizer

from accel_backends.ops.optimizer_support import BEYOND_ELEMENTS, ON_HOST, steps_by_element
from accel_planner.candidate import Candidate
from accel_planner.cost.communication import CollectiveBytes, Traffic, ring
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.model import CostModel, Parts
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile, ParameterFact, Timeline

# DeepSpeed's defaults, in elements (not bytes).
BUCKET = 500_000_000
MAX_LIVE = 1_000_000_000
PERSISTENT = 100_000  # at stage 3, smaller parameters stay gathered
MASTER = torch.float32
# Groups are padded to this many elements for each rank (DeepSpeed's ``nccl_start_alignment_factor``).
_ALIGNMENT = 2


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one rank: those that persist between steps, and temporary buffers.

    Attributes:
        parameters: in the compute dtype; at stage 3 this rank's partitions, and small parameters in full.
        gradients: after the backward.
        states: fp32 master weights of this rank's partition, if there are any, and its optimizer states.
        fed: fp32 gradients for an optimizer on the host; included in ``gradients`` and ``reserved``.
        reserved: gradients and buffers that are allocated once and kept.
        bucket: reduction bucket; at stages 1 and 2 allocated by the first gradient of a backward.
        gathered: peak of gathered parameters of other ranks.
        reduced: additional temporary memory of a reduction.
    """

    parameters: int
    gradients: int
    states: int
    fed: int
    reserved: int
    bucket: int
    gathered: int
    reduced: int


@final
class ZeroCost(CostModel):
    """Stage 1 partitions master weights and optimizer states, stage 2 also gradients, stage 3 also parameters.

    Models are held in the compute dtype. The optimizer steps on fp32 master weights of this rank's partition; at stages
    1 and 2 in fp32 without offloading, it steps on the model's own memory.
    """

    library = "deepspeed"
    native = True

    def candidates(self, hardware: Hardware) -> Iterable[Candidate]:
        """Each stage, with activation checkpointing and offloading."""
        for stage in (1, 2, 3):
            unfit = frozenset(BEYOND_ELEMENTS["deepspeed"])
            base = Candidate(f"zero:{stage}", "deepspeed", {"zero_stage": stage}, unfit=unfit)
            plain = base, base.checkpointed()
            yield from plain
            options = {"offload_optimizer_device": "cpu"}
            if stage == 3:
                options["offload_param_device"] = "cpu"
            yield from (candidate.offloaded(options, optimizers=ON_HOST) for candidate in plain)

    def memory(
        self, profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
    ) -> tuple[Parts, int]:
        """Partitions, DeepSpeed's buffers, and the activations of the step. On a CPU, offloading moves nothing."""
        stage = _stage(candidate)
        timeline = self.timeline(profile, candidate)
        sizes = _sizes(profile, optimizer, hardware, stage, offload=candidate.offload)
        flat = ParameterFact("", (_part(sum(p.numel for p in profile.trainable), hardware.ranks),), MASTER, True, 0)
        step = round(flat.nbytes * max(optimizer.scratch.values(), default=0.0))
        other = profile.buffers + profile.inputs
        parameters, gradients, states, reserved = sizes.parameters, sizes.gradients, sizes.states, sizes.reserved
        host = 0
        if candidate.offload and hardware.kind != "cpu":
            host, states, step = states + sizes.fed, 0, 0
            gradients, reserved = gradients - sizes.fed, reserved - sizes.fed
            if stage == 3:
                host, parameters = host + parameters, 0
            if stage > 1:
                host, gradients, reserved = host + gradients, 0, reserved - gradients
        moving = max(_moments(timeline, profile, sizes))
        stepping = (0 if stage == 3 else sizes.bucket + flat.nbytes) + step
        communication = sizes.bucket + sizes.gathered + sizes.reduced
        parts = Parts(parameters, gradients, states, timeline.activations, communication, other, step, host)
        return parts, parameters + states + reserved + other + max(moving, stepping)

    def traffic(self, profile: ModelProfile, hardware: Hardware, candidate: Candidate) -> Traffic:
        """Stage 3 gathers in the forward and in the backward; stages 1 and 2 gather the updated parameters once."""
        moved, ranks = CollectiveBytes.of(profile), hardware.ranks
        gathers = 2 if _stage(candidate) == 3 else 1
        amount = ring(moved.parameters, ranks) * gathers + ring(moved.updated, ranks)
        local, remote = (amount, 0) if ranks <= hardware.devices else (0, amount)
        host = 2 * (moved.parameters // ranks + moved.gradients // ranks) if candidate.offload else 0
        return Traffic(local, remote, host, moved.units * (gathers + 1))

    def steps_with(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer updates slices of flat tensors as it updates full tensors."""
        return steps_by_element(optimizer)


def _stage(candidate: Candidate) -> int:
    return int(candidate.options["zero_stage"])


def _sizes(profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, stage: int, *, offload: bool) -> Sizes:
    ranks = hardware.ranks
    compute = profile.policy.compute
    held = [_held(parameter, compute) for parameter in profile.parameters]
    trained = [parameter for parameter in held if parameter.trainable]
    numel = sum(parameter.numel for parameter in trained)
    width = max((parameter.dtype.itemsize for parameter in trained), default=MASTER.itemsize)
    wide = max(width, MASTER.itemsize)  # gradients are reduced in fp32, and from stage 2 on accumulated in fp32
    halves = width < wide
    bucket = min(BUCKET, numel + numel % 2)
    copies = hardware.kind == "cpu" and ranks > 1  # gloo's collectives copy their buffers
    if stage == 3:
        part = sum(_part(parameter.numel, ranks) for parameter in trained)
        small = sum(parameter.nbytes for parameter in held if parameter.numel <= PERSISTENT and ranks > 1)
        full = sum(parameter.nbytes for parameter in held)
        parameters = sum(_part(parameter.numel, ranks) * parameter.dtype.itemsize for parameter in held) + small
        gathered = min(MAX_LIVE * width, full - small) if ranks > 1 else 0
        reduced = part * wide + (bucket * wide if copies else 0)
        gradients, reserved = part * wide, part * wide + bucket * wide
    else:
        padded = numel + -numel % (_ALIGNMENT * ranks)
        part = padded // ranks
        frozen = sum(parameter.nbytes for parameter in held if not parameter.trainable)
        parameters, gathered = padded * width + frozen, 0
        bucket_width = wide if stage == 1 and offload else width
        gradients = numel * bucket_width if stage == 1 else _kept(trained, part, ranks, halves=halves)
        reserved = gradients if stage == 2 and offload and not halves else 0
        reduced = (bucket * wide if copies or halves else 0) + (part * wide if halves else 0)
        if stage == 2 and halves:  # made by the first reduction of a window, and dropped by the step
            reduced += gradients
    fed = part * MASTER.itemsize if offload else 0
    shared = stage < 3 and width == MASTER.itemsize and not offload
    copied = 0 if shared else part * MASTER.itemsize
    states = copied + _flat_states(optimizer, profile, part)
    buffer = 0 if stage == 3 else bucket * bucket_width
    return Sizes(parameters, gradients + fed, states, fed, reserved + fed, buffer, gathered, reduced)


def _kept(trained: Sequence[ParameterFact], part: int, ranks: int, *, halves: bool) -> int:
    """Gradient bytes of stage 2 on the rank with the most: its partition, or the full gradients that overlap it."""
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
    """Bytes beyond the persistent ones at each mark of a step, and during the reduction of gradients."""
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
    """Bytes of the partition's optimizer states: those states that have the parameters' shape."""
    # Not of a scalar, whose states do not show whether they follow the parameter (a temperature, CLIP's logit_scale).
    first = next((parameter for parameter in profile.trainable if parameter.shape), None)
    if first is None:
        return 0
    states = optimizer.states[len(first.shape), first.dtype.itemsize]
    return sum(part * (state.itemsize or MASTER.itemsize) for state in states if state.like)
