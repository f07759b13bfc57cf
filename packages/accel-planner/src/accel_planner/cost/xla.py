"""Memory of a step that XLA compiles as one program for all devices; pure.

Held against the buffers that XLA's compiler assigns on its CPU device (``benchmarks/planner_xla.py``): parts exact,
the peak of language models and plain networks from 17 % too low to 36 % too high. What a compiler fuses, keeps or
computes again is its own affair; convolutions take three times as much on that device.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from accel_planner.cost.hardware import Hardware
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile, ParameterFact

if TYPE_CHECKING:
    from accel_planner.candidate import Candidate
    from accel_planner.cost.model import Parts


def plan_compiled(
    profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: "Candidate"
) -> "tuple[Parts, int]":
    """Every device holds all, or of each parameter, gradient and state a part along its longest dimension.

    Results of the program have memory of their own from its beginning, gradients twice: torch takes that of a matrix as
    the transpose of what was computed, and both outlive the step. What is sharded is gathered for forward and stays.
    """
    from accel_planner.cost.model import Parts

    _, shards = candidate.degrees(hardware.devices, hardware.nodes)
    timeline = profile.timeline(native=False, checkpointed=candidate.checkpointing)
    held = [_longest_first(parameter) for parameter in profile.parameters]
    trained = [parameter for parameter in held if parameter.trainable]
    parameters = sum(_part(parameter, shards) for parameter in held)
    gradients = sum(_part(parameter, shards) for parameter in trained)
    states = sum(optimizer.state_bytes(parameter, shards) for parameter in trained)
    gathered = sum(parameter.nbytes for parameter in held) if shards > 1 else 0
    other = profile.buffers + profile.inputs
    peak = parameters + 2 * gradients + states + other + timeline.activations + gathered
    return Parts(parameters, gradients, states, timeline.activations, gathered, other, 0), peak


def _longest_first(parameter: ParameterFact) -> ParameterFact:
    """The same parameter, so that the dimension along which it is split comes first."""
    return replace(parameter, shape=tuple(sorted(parameter.shape, reverse=True)))


def _part(parameter: ParameterFact, shards: int) -> int:
    return parameter.shard_numel(shards) * parameter.dtype.itemsize
