"""Cost model of FSDP: units are gathered from shards, and their gradients reduce-scattered; pure."""

from collections.abc import Iterable, Iterator
from typing import final

from accel_backends.fsdp.shard import shard_dtypes
from accel_backends.ops.optimizer_support import BEYOND_ELEMENTS
from accel_planner.candidate import Candidate
from accel_planner.cost.communication import Traffic, sharded_traffic
from accel_planner.cost.fsdp_simulator import ShardedUnits, replay_sharded, unit_bytes
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.model import CostModel, Parts
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile

# Strategies that keep gathered parameters until after the backward.
_KEEP = frozenset({"NO_SHARD", "SHARD_GRAD_OP"})


@final
class FSDPCost(CostModel):
    """Costs of torch's ``fully_shard``, simulated unit by unit."""

    native = True

    def candidates(self, hardware: Hardware) -> Iterable[Candidate]:
        """Each sharding strategy that differs on this hardware, with activation checkpointing and offloading."""
        for strategy in _strategies(hardware):
            base = Candidate(
                f"fsdp:{strategy.lower()}",
                "fsdp",
                {"sharding_strategy": strategy},
                unfit=frozenset(BEYOND_ELEMENTS["fsdp"]),
            )
            plain = base, base.checkpointed({"activation_checkpointing": True})
            yield from plain
            if strategy != "NO_SHARD":  # full parameters would be in host memory once for each rank
                yield from (candidate.offloaded({"cpu_offload": True}) for candidate in plain)

    def memory(
        self, profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
    ) -> tuple[Parts, int]:
        """Shards of parameters, gradients and states; the peak is that of the simulated step.

        On a CPU, offloading moves nothing.
        """
        replicas, shards = _degrees(candidate, hardware)
        timeline = self.timeline(profile, candidate)
        away = candidate.offload and hardware.kind != "cpu"
        dtypes = shard_dtypes(profile.policy)
        units = unit_bytes(
            profile, shards, compute=dtypes.get("param_dtype"), reduce=dtypes.get("reduce_dtype"), offloaded=away
        )
        how = ShardedUnits(
            shards,
            keeps=_keeps(candidate),
            holds_reduced=replicas > 1,
            copies=hardware.kind == "cpu",
            gradients_leave=away,
        )
        moving = replay_sharded(timeline, units, how)
        parameters = sum(p.shard_numel(shards) * p.dtype.itemsize for p in profile.parameters)
        full = [p for p in profile.trainable if not p.sharded]
        gradients = sum(unit.kept for unit in units) + sum(p.nbytes for p in full)
        states = sum(optimizer.state_bytes(p, shards) for p in profile.trainable)
        step = optimizer.scratch_bytes((p, p.shard_numel(shards)) for p in profile.trainable)
        other = profile.buffers + profile.inputs
        if away:
            host = parameters + gradients + states
            parts = Parts(0, 0, 0, timeline.activations, moving.communication, other, 0, host)
            return parts, other + moving.total
        parts = Parts(parameters, gradients, states, timeline.activations, moving.communication, other, step)
        return parts, parameters + states + other + max(moving.total, gradients + step)

    def traffic(self, profile: ModelProfile, hardware: Hardware, candidate: Candidate) -> Traffic:
        """Gathered units and reduce-scattered gradients, which replicas all-reduce."""
        replicas, shards = _degrees(candidate, hardware)
        return sharded_traffic(
            profile, hardware, replicas=replicas, shards=shards, keeps=_keeps(candidate), offload=candidate.offload
        )


def _strategies(hardware: Hardware) -> Iterator[str]:
    if hardware.ranks > 1:
        yield "NO_SHARD"
        yield "SHARD_GRAD_OP"
        if hardware.nodes > 1 and hardware.devices > 1:
            yield "HYBRID_SHARD"
    yield "FULL_SHARD"


def _keeps(candidate: Candidate) -> bool:
    return candidate.options["sharding_strategy"] in _KEEP


def _degrees(candidate: Candidate, hardware: Hardware) -> tuple[int, int]:
    """Number of replicas, and shard degree."""
    strategy = candidate.options["sharding_strategy"]
    if strategy == "NO_SHARD":
        return hardware.ranks, 1
    return (hardware.nodes, hardware.devices) if strategy == "HYBRID_SHARD" else (1, hardware.ranks)
