"""Memory of a step that XLA compiles as one program for all devices; pure.

Held against the buffers that XLA's compiler assigns on its CPU device (``benchmarks/planner_xla.py``). What the compiler
fuses or computes again is not known before, so activations are those of eager execution, which is the most.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from accel.planner.hardware import Hardware
from accel.planner.optimizers import OptimizerFacts
from accel.planner.profile import ModelProfile, ParameterFact
from accel.planner.replay import replay_whole

if TYPE_CHECKING:
    from accel.planner.candidate import Candidate
    from accel.planner.memory import Parts


def plan_compiled(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: "Candidate"
) -> "tuple[Parts, int]":
    """Every device holds all, or of each parameter, gradient and state a part along its longest dimension.

    What is sharded is gathered for the layer that computes, and its gradients are whole before they are summed: two
    units are there at the worst moment.
    """
    from accel.planner.memory import Parts

    _, shards = candidate.degrees(hardware.devices, hardware.nodes)
    timeline = profile.timeline(native=False, checkpointed=candidate.checkpointing)
    held = [_longest_first(parameter) for parameter in profile.parameters]
    trained = [parameter for parameter in held if parameter.trainable]
    parameters = sum(_part(parameter, shards) for parameter in held)
    gradients = sum(_part(parameter, shards) for parameter in trained)
    states = sum(optimizer.state_bytes(parameter, shards) for parameter in trained)
    gathered = 2 * _largest_unit(profile) if shards > 1 else 0
    other = profile.buffers + profile.inputs
    moving = replay_whole(timeline, gradients, buckets=False)
    activations = max(moving.total - moving.gradients, 0)
    peak = parameters + gradients + states + other + activations + gathered
    return Parts(parameters, gradients, states, timeline.activations, gathered, other, 0), peak


def _longest_first(parameter: ParameterFact) -> ParameterFact:
    """The same parameter, so that the dimension along which it is split comes first."""
    return replace(parameter, shape=tuple(sorted(parameter.shape, reverse=True)))


def _part(parameter: ParameterFact, shards: int) -> int:
    return parameter.shard_numel(shards) * parameter.dtype.itemsize


def _largest_unit(profile: ModelProfile) -> int:
    sizes = [0] * len(profile.units)
    for parameter in profile.parameters:
        sizes[parameter.unit] += parameter.nbytes
    return max(sizes)
