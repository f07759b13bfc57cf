"""Bytes that a step communicates, and an estimate of the step's time; pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from accel_backends.fsdp.config import FSDPConfig
from accel_backends.fsdp.shard import shard_dtypes
from accel_planner.profile.profile import ModelProfile, ParameterFact

if TYPE_CHECKING:
    from accel_planner.candidate import Candidate
    from accel_planner.cost.hardware import Hardware

# Fraction of communication that computation cannot overlap: the first all-gather and the last reduce-scatter.
EXPOSED = 0.1
# Bytes that the optimizer of one CPU core updates in a second.
HOST_STEP = 10e9


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication volume of one device in a step of one micro-batch.

    Attributes:
        local: bytes sent within its node.
        remote: bytes sent to other nodes; collectives that span several nodes count here.
        host: bytes between the device and host memory, both directions.
        collectives: number of collectives.
    """

    local: int
    remote: int
    host: int
    collectives: int

    @property
    def total(self) -> int:
        """Bytes sent to other devices."""
        return self.local + self.remote


def traffic_of(profile: ModelProfile, hardware: "Hardware", candidate: "Candidate") -> Traffic:
    """Communication volume of a strategy. In a ring, each rank sends (n-1)/n of the gathered or scattered bytes."""
    replicas, shards = candidate.degrees(hardware.devices, hardware.nodes)
    dtypes = shard_dtypes(profile.policy, FSDPConfig())
    compute, reduce = dtypes.get("param_dtype"), dtypes.get("reduce_dtype")
    units = len({parameter.unit for parameter in profile.parameters})
    within, between = 0, 0
    collectives = 0
    host = 0
    if candidate.kind == "whole" or (candidate.kind == "compiled" and shards == 1):
        gradients = sum(parameter.nbytes for parameter in profile.trainable)
        amount, collectives = 2 * _passed(gradients, replicas), -(-gradients // (25 * 2**20))
        collectives = collectives if replicas > 1 else 0
        within, between = (amount, 0) if hardware.nodes == 1 else (0, amount)
        return Traffic(within, between, 0, collectives)
    gathered = sum(_size(p, compute) for p in profile.parameters)
    root = sum(_size(p, compute) for p in profile.parameters if p.unit == 0)
    summed = sum(_size(p, reduce or compute) for p in profile.trainable)
    if candidate.kind == "zero":
        # Stage 3 gathers in the forward and in the backward; stages 1 and 2 gather the updated parameters once.
        amount = _passed(gathered, shards) * (2 if candidate.stage == 3 else 1) + _passed(
            _sum(profile, compute), shards
        )
        collectives = units * (3 if candidate.stage == 3 else 2)
        stays = shards <= hardware.devices
        host = 2 * (gathered // shards + summed // shards) if candidate.offload else 0
        return Traffic(amount if stays else 0, 0 if stays else amount, host, collectives)
    twice = 0 if candidate.keeps else _passed(gathered - root, shards)
    sharding = _passed(gathered, shards) + twice + _passed(summed, shards)
    replicating = 2 * _passed(summed // shards, replicas)
    collectives = units * ((2 if candidate.keeps else 3) * (shards > 1) + (replicas > 1))
    within += sharding if shards <= hardware.devices else 0
    between += sharding if shards > hardware.devices else 0
    within += replicating if hardware.nodes == 1 else 0
    between += replicating if hardware.nodes > 1 else 0
    if candidate.offload:
        times = 1 if candidate.keeps else 2
        host = times * (gathered // shards) + summed // shards
    return Traffic(within, between, host, collectives)


def estimate_seconds(flops: int, traffic: Traffic, hardware: "Hardware", stepped: int, candidate: "Candidate") -> float:
    """Estimated seconds of a step: computation and communication overlap, except for ``EXPOSED`` of the communication.

    Devices of one node share its link to other nodes.

    Args:
        stepped: bytes that the optimizer updates.
    """
    computing = flops / hardware.flops
    # A ring over nodes sends one device's volume over each node's link, once for all devices of the node together.
    sending = traffic.local / hardware.local + traffic.remote / hardware.remote
    sending += traffic.collectives * hardware.latency
    copying = traffic.host / hardware.host
    stepping = stepped / HOST_STEP if candidate.offload else 0.0
    return max(computing, sending + copying) + EXPOSED * (sending + copying) + stepping


def _passed(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _size(parameter: ParameterFact, dtype: torch.dtype | None) -> int:
    if not parameter.sharded:
        return 0
    wanted = dtype if dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
    return parameter.numel * wanted.itemsize


def _sum(profile: ModelProfile, dtype: torch.dtype | None) -> int:
    return sum(_size(parameter, dtype) for parameter in profile.trainable)
