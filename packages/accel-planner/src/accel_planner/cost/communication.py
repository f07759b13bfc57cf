"""Bytes that a step communicates, and an estimate of the step's time; pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from accel_backends.fsdp.shard import shard_dtypes
from accel_planner.profile.profile import ModelProfile, ParameterFact

if TYPE_CHECKING:
    from accel_planner.cost.hardware import Hardware

# Fraction of communication that computation cannot overlap: the first all-gather and the last reduce-scatter.
EXPOSED = 0.1
# Bytes that the optimizer of one CPU core updates in a second.
HOST_STEP = 10e9
# Bytes of DDP's default bucket.
_BUCKET = 25 * 2**20


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


@final
@dataclass(frozen=True, slots=True)
class CollectiveBytes:
    """Bytes of all sharded parameters and gradients in the dtypes in which collectives move them.

    Attributes:
        parameters: all parameters, in the compute dtype.
        root: those of the root unit.
        updated: the trainable parameters, in the compute dtype.
        gradients: gradients, in the dtype of the reduction.
        units: number of units that have parameters.
    """

    parameters: int
    root: int
    updated: int
    gradients: int
    units: int

    @classmethod
    def of(cls, profile: ModelProfile) -> "CollectiveBytes":
        """Returns the bytes of a model."""
        dtypes = shard_dtypes(profile.policy)
        compute, reduce = dtypes.get("param_dtype"), dtypes.get("reduce_dtype")
        return cls(
            parameters=_bytes(profile.parameters, compute),
            root=_bytes((parameter for parameter in profile.parameters if parameter.unit == 0), compute),
            updated=_bytes(profile.trainable, compute),
            gradients=_bytes(profile.trainable, reduce or compute),
            units=len({parameter.unit for parameter in profile.parameters}),
        )


def ring(size: int, ranks: int) -> int:
    """Bytes that each rank sends in an all-gather or reduce-scatter of ``size`` bytes in a ring: (n-1)/n of them."""
    return size * (ranks - 1) // ranks


def replicated_traffic(profile: ModelProfile, hardware: "Hardware") -> Traffic:
    """Communication volume of replicas on all devices, whose gradients are all-reduced in buckets."""
    gradients = sum(parameter.nbytes for parameter in profile.trainable)
    amount = 2 * ring(gradients, hardware.ranks)
    collectives = -(-gradients // _BUCKET) if hardware.ranks > 1 else 0
    within, between = (amount, 0) if hardware.nodes == 1 else (0, amount)
    return Traffic(within, between, 0, collectives)


def sharded_traffic(
    profile: ModelProfile, hardware: "Hardware", *, replicas: int, shards: int, keeps: bool, offload: bool
) -> Traffic:
    """Communication volume of a model whose units are gathered from shards and whose gradients are reduce-scattered.

    ``keeps``: gathered parameters are kept until after the backward, except the root unit's, which always are.
    """
    moved = CollectiveBytes.of(profile)
    again = 0 if keeps else ring(moved.parameters - moved.root, shards)
    sharding = ring(moved.parameters, shards) + again + ring(moved.gradients, shards)
    replicating = 2 * ring(moved.gradients // shards, replicas)
    collectives = moved.units * ((2 if keeps else 3) * (shards > 1) + (replicas > 1))
    within = (sharding if shards <= hardware.devices else 0) + (replicating if hardware.nodes == 1 else 0)
    host = (1 if keeps else 2) * (moved.parameters // shards) + moved.gradients // shards if offload else 0
    return Traffic(within, sharding + replicating - within, host, collectives)


def estimate_seconds(flops: int, traffic: Traffic, hardware: "Hardware", stepped_on_host: int = 0) -> float:
    """Estimated seconds of a step: computation and communication overlap, except for ``EXPOSED`` of the communication.

    Devices of one node share its link to other nodes.

    Args:
        stepped_on_host: bytes that an optimizer on the host updates.
    """
    computing = flops / hardware.flops
    # A ring over nodes sends one device's volume over each node's link, once for all devices of the node together.
    sending = traffic.local / hardware.local + traffic.remote / hardware.remote
    sending += traffic.collectives * hardware.latency
    copying = traffic.host / hardware.host
    return max(computing, sending + copying) + EXPOSED * (sending + copying) + stepped_on_host / HOST_STEP


def _bytes(parameters: Iterable[ParameterFact], dtype: torch.dtype | None) -> int:
    return sum(_size(parameter, dtype) for parameter in parameters)


def _size(parameter: ParameterFact, dtype: torch.dtype | None) -> int:
    if not parameter.sharded:
        return 0
    wanted = dtype if dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
    return parameter.numel * wanted.itemsize
