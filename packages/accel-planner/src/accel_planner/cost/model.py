"""Memory model: bytes of one candidate by part, and the peak of a step; pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.shard import shard_dtypes
from accel_planner.candidate import Candidate, candidates
from accel_planner.cost.communication import Traffic, estimate_seconds, traffic_of
from accel_planner.cost.fsdp import Peak, ShardedUnits, replay_replicated, replay_sharded, unit_bytes
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.cost.xla import plan_compiled
from accel_planner.cost.zero import plan_zero
from accel_planner.profile.profile import ModelProfile


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one device (of the rank with the most). The parts do not peak at the same moment.

    Attributes:
        parameters: stored parameters, full or sharded; gathered parameters count as communication.
        gradients: gradients after the backward.
        optimizer: optimizer states (and ZeRO's fp32 master weights).
        activations: peak of forward and backward.
        communication: peak of gathered parameters and collective buffers.
        other: the model's buffers and the batch.
        step: temporary memory of the optimizer's step.
        host: one rank's parameters, gradients and states that are offloaded to host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    other: int
    step: int
    host: int = 0


@final
@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory, communication and time of one candidate.

    Attributes:
        candidate: the strategy.
        hardware: the hardware that it is planned for.
        parts: bytes per device, by part.
        peak: peak bytes per device within a step.
        traffic: bytes per device that a step communicates.
        seconds: estimated time of an optimizer step of one micro-batch, used to rank candidates.
    """

    candidate: Candidate
    hardware: Hardware
    parts: Parts
    peak: int
    traffic: Traffic
    seconds: float

    @property
    def host_of_node(self) -> int:
        """Host memory in bytes that all devices of a node use for offloading."""
        return self.parts.host * self.hardware.devices


def plan_all(
    profile: ModelProfile,
    optimizer: OptimizerFacts,
    hardware: Hardware,
    chosen: Iterable[Candidate] | None = None,
) -> list[MemoryPlan]:
    """Plans all candidates, or those given."""
    if chosen is None:
        chosen = candidates(hardware.devices, hardware.nodes, blocks=bool(profile.blocks), kind=hardware.kind)
    return [plan_memory(profile, optimizer, hardware, candidate) for candidate in chosen]


def plan_memory(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
) -> MemoryPlan:
    """Plans one candidate."""
    make = {"whole": _plan_whole, "sharded": _plan_sharded, "zero": plan_zero, "compiled": plan_compiled}[
        candidate.kind
    ]
    parts, peak = make(profile, optimizer, hardware, candidate)
    traffic = traffic_of(profile, hardware, candidate)
    timeline = profile.timeline(native=candidate.kind in ("sharded", "zero"), checkpointed=candidate.checkpointing)
    seconds = estimate_seconds(timeline.flops, traffic, hardware, parts.optimizer + parts.host, candidate)
    return MemoryPlan(candidate, hardware, parts, peak, traffic, seconds)


def _plan_whole(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
) -> tuple[Parts, int]:
    timeline = profile.timeline(native=False, checkpointed=candidate.checkpointing)
    parameters = sum(parameter.nbytes for parameter in profile.parameters)
    gradients = sum(parameter.nbytes for parameter in profile.trainable)
    states = sum(optimizer.state_bytes(parameter, 1) for parameter in profile.trainable)
    step = optimizer.scratch_bytes((parameter, parameter.numel) for parameter in profile.trainable)
    moving = replay_replicated(timeline, gradients, buckets=hardware.ranks > 1 and gradients > 0)
    other = profile.buffers + profile.inputs
    resident = parameters + states + other
    peak = resident + max(moving.total, moving.communication + gradients + step)
    return Parts(parameters, gradients, states, timeline.activations, moving.communication, other, step), peak


def _plan_sharded(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
) -> tuple[Parts, int]:
    replicas, shards = candidate.degrees(hardware.devices, hardware.nodes)
    timeline = profile.timeline(native=True, checkpointed=candidate.checkpointing)
    away = candidate.offload and hardware.kind != "cpu"
    dtypes = shard_dtypes(profile.policy, FSDPConfig())
    units = unit_bytes(
        profile, shards, compute=dtypes.get("param_dtype"), reduce=dtypes.get("reduce_dtype"), offloaded=away
    )
    how = ShardedUnits(
        shards,
        keeps=candidate.keeps,
        holds_reduced=replicas > 1,
        copies=hardware.kind == "cpu",
        gradients_leave=away,
    )
    moving = replay_sharded(timeline, units, how)
    parameters = sum(p.shard_numel(shards) * p.dtype.itemsize for p in profile.parameters)
    whole = [p for p in profile.trainable if not p.sharded]
    gradients = sum(unit.kept for unit in units) + sum(p.nbytes for p in whole)
    states = sum(optimizer.state_bytes(p, shards) for p in profile.trainable)
    step = optimizer.scratch_bytes((p, p.shard_numel(shards)) for p in profile.trainable)
    other = profile.buffers + profile.inputs
    if away:
        parts = Parts(0, 0, 0, timeline.activations, moving.communication, other, 0, parameters + gradients + states)
        return parts, other + moving.total
    resident = parameters + states + other
    peak = resident + _most(moving, gradients + step)
    return Parts(parameters, gradients, states, timeline.activations, moving.communication, other, step), peak


def _most(moving: Peak, stepping: int) -> int:
    return max(moving.total, stepping)
