"""Bytes of one way of training, by part and at their worst moment; pure."""

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
    """Bytes on one device (of the fullest rank). They do not reach their most at the same moment.

    Attributes:
        parameters: stored, whole or as a shard; gathered ones are communication.
        gradients: after backward.
        optimizer: the optimizer's states (and ZeRO's fp32 copies of the parameters).
        activations: most that forward and backward hold.
        communication: most of gathered parameters and buffers of collectives.
        other: the model's buffers and the batch.
        step: taken by the optimizer while it steps.
        host: parameters, gradients and states that live in the node's memory instead, of one rank.
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
    """One candidate in numbers.

    Attributes:
        candidate: the way of training.
        hardware: where.
        parts: bytes per device.
        peak: most bytes per device at any moment of a step.
        traffic: bytes per device that a step sends.
        seconds: estimate of an optimizer step of one micro-batch, to compare candidates by.
    """

    candidate: Candidate
    hardware: Hardware
    parts: Parts
    peak: int
    traffic: Traffic
    seconds: float

    @property
    def host_of_node(self) -> int:
        """Bytes that a node's memory holds of all its devices."""
        return self.parts.host * self.hardware.devices


def plan_all(
    profile: ModelProfile,
    optimizer: OptimizerFacts,
    hardware: Hardware,
    chosen: Iterable[Candidate] | None = None,
) -> list[MemoryPlan]:
    """The plans of all candidates, or of those given."""
    if chosen is None:
        chosen = candidates(hardware.devices, hardware.nodes, blocks=bool(profile.blocks), kind=hardware.kind)
    return [plan_memory(profile, optimizer, hardware, candidate) for candidate in chosen]


def plan_memory(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
) -> MemoryPlan:
    """The plan of one candidate."""
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
