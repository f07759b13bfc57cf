"""Cost model of a backend: the candidates that it adds, and the memory and communication of each."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_planner.candidate import Candidate
    from accel_planner.cost.communication import Traffic
    from accel_planner.cost.hardware import Hardware
    from accel_planner.cost.optimizers import OptimizerFacts
    from accel_planner.profile.profile import ModelProfile, Timeline


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


class CostModel(ABC):
    """Predicts the costs of the strategies of one backend; named in the entry-point group ``accel.cost_models``.

    The entry has the backend's name. All methods are pure functions of their arguments.
    """

    library: ClassVar[str | None] = None
    """Import name of a library that the backend needs in addition to its package."""
    native: ClassVar[bool] = False
    """The backend computes in the policy's dtype itself instead of under autocast."""
    spmd: ClassVar[bool] = False
    """The backend is for devices that one process drives together (XLA); otherwise for one process per device."""

    @abstractmethod
    def candidates(self, hardware: "Hardware") -> Iterable["Candidate"]:
        """Returns the backend's strategies on this hardware, the simplest first; none if it is of no use there.

        Those with activation checkpointing are left out by the planner if the model has no repeated blocks.
        """

    @abstractmethod
    def memory(
        self, profile: "ModelProfile", optimizer: "OptimizerFacts", hardware: "Hardware", candidate: "Candidate"
    ) -> tuple[Parts, int]:
        """Returns the bytes of one device by part, and the peak of a step."""

    @abstractmethod
    def traffic(self, profile: "ModelProfile", hardware: "Hardware", candidate: "Candidate") -> "Traffic":
        """Returns the communication volume of one device in a step."""

    def steps_with(self, optimizer: "Optimizer") -> bool:
        """Returns whether the backend can step with this optimizer, which may be tried out. Default: True.

        Optimizers that a candidate refuses by the name of their class are not asked about.
        """
        return True

    @final
    def timeline(self, profile: "ModelProfile", candidate: "Candidate") -> "Timeline":
        """Returns the trace of the step as this backend computes it."""
        return profile.timeline(native=self.native, checkpointed=candidate.checkpointing)
