"""Cost models of backends that keep a full model on every rank: one device, and DistributedDataParallel; pure."""

from abc import ABC
from collections.abc import Iterable, Iterator
from typing import final

from accel_planner.candidate import Candidate
from accel_planner.cost.communication import Traffic, replicated_traffic
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.model import CostModel, Parts
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile, Timeline


class ReplicatedCost(CostModel, ABC):
    """Costs of full replicas whose gradients are all-reduced in DDP's buckets."""

    def memory(
        self, profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
    ) -> tuple[Parts, int]:
        """Full parameters, gradients and states; with several ranks, buckets as large as the gradients."""
        timeline = self.timeline(profile, candidate)
        parameters = sum(parameter.nbytes for parameter in profile.parameters)
        gradients = sum(parameter.nbytes for parameter in profile.trainable)
        states = sum(optimizer.state_bytes(parameter, 1) for parameter in profile.trainable)
        step = optimizer.scratch_bytes((parameter, parameter.numel) for parameter in profile.trainable)
        buckets = gradients if hardware.ranks > 1 else 0
        other = profile.buffers + profile.inputs
        peak = parameters + states + other + buckets + max(_peak(timeline), gradients + step)
        return Parts(parameters, gradients, states, timeline.activations, buckets, other, step), peak

    def traffic(self, profile: ModelProfile, hardware: Hardware, candidate: Candidate) -> Traffic:
        """All-reduced gradients."""
        return replicated_traffic(profile, hardware)


@final
class SingleCost(ReplicatedCost):
    """Costs of training on one device."""

    def candidates(self, hardware: Hardware) -> Iterable[Candidate]:
        """The plain step and activation checkpointing, on one device."""
        return _plain("single") if hardware.ranks == 1 else ()


@final
class DDPCost(ReplicatedCost):
    """Costs of DistributedDataParallel."""

    def candidates(self, hardware: Hardware) -> Iterable[Candidate]:
        """The plain step and activation checkpointing, on several devices."""
        return _plain("ddp") if hardware.ranks > 1 else ()


def _plain(backend: str) -> Iterator[Candidate]:
    base = Candidate(backend, backend)
    yield base
    yield base.checkpointed()


def _peak(timeline: Timeline) -> int:
    """Peak of activations and of the gradients that accumulate in the backward."""
    total = made = 0
    for mark in timeline.marks:
        total = max(total, made + mark.highest)
        made += mark.amount
        total = max(total, made + mark.level)
    return total
