"""Cost model of a step that XLA compiles as one program for all devices; pure.

Compared with the buffer assignment of XLA's compiler on its CPU device (``benchmarks/planner_xla.py``): parts are
exact; the peak of language models and plain networks is between 17 % too low and 36 % too high. The compiler's
fusion and rematerialization are not modelled; convolutions take three times as much on that device.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from accel_planner.candidate import Candidate
from accel_planner.cost.communication import Traffic, replicated_traffic, sharded_traffic
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.model import CostModel, Parts
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.profile.profile import ModelProfile, ParameterFact


@final
class XLACost(CostModel):
    """Every device holds full tensors, or shards of parameters, gradients and states along their longest dimension.

    The program's outputs are allocated from its beginning, and gradients twice: torch transposes the computed gradient
    of a matrix, and both copies outlive the step. Sharded parameters are gathered for the forward and stay gathered.
    """

    library = "torch_xla"
    spmd = True

    def candidates(self, hardware: Hardware) -> Iterable[Candidate]:
        """Full tensors, and shards."""
        yield Candidate("xla", "xla", {"shard_parameters": False})
        yield Candidate("xla:shard", "xla", {"shard_parameters": True})

    def memory(
        self, profile: ModelProfile, optimizer: OptimizerFacts, hardware: Hardware, candidate: Candidate
    ) -> tuple[Parts, int]:
        """The arguments and outputs of the program, activations, and gathered parameters."""
        shards = _shards(candidate, hardware)
        timeline = self.timeline(profile, candidate)
        held = [_longest_first(parameter) for parameter in profile.parameters]
        trained = [parameter for parameter in held if parameter.trainable]
        parameters = sum(_part(parameter, shards) for parameter in held)
        gradients = sum(_part(parameter, shards) for parameter in trained)
        states = sum(optimizer.state_bytes(parameter, shards) for parameter in trained)
        gathered = sum(parameter.nbytes for parameter in held) if shards > 1 else 0
        other = profile.buffers + profile.inputs
        peak = parameters + 2 * gradients + states + other + timeline.activations + gathered
        return Parts(parameters, gradients, states, timeline.activations, gathered, other, 0), peak

    def traffic(self, profile: ModelProfile, hardware: Hardware, candidate: Candidate) -> Traffic:
        """All-reduced gradients of full tensors; of shards, one all-gather and one reduce-scatter."""
        shards = _shards(candidate, hardware)
        if shards == 1:
            return replicated_traffic(profile, hardware)
        return sharded_traffic(profile, hardware, replicas=1, shards=shards, keeps=True, offload=False)


def _shards(candidate: Candidate, hardware: Hardware) -> int:
    return hardware.ranks if candidate.options["shard_parameters"] else 1


def _longest_first(parameter: ParameterFact) -> ParameterFact:
    """Returns the parameter with its longest dimension, along which it is sharded, first."""
    return replace(parameter, shape=tuple(sorted(parameter.shape, reverse=True)))


def _part(parameter: ParameterFact, shards: int) -> int:
    return parameter.shard_numel(shards) * parameter.dtype.itemsize
