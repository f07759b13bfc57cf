"""Plans: memory, communication and time of the candidates of all cost models; pure except for their discovery."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from accel_planner.candidate import Candidate
from accel_planner.cost.communication import Traffic, estimate_seconds
from accel_planner.cost.hardware import Hardware
from accel_planner.cost.model import CostModel, Parts
from accel_planner.cost.optimizers import OptimizerFacts
from accel_planner.cost.registry import cost_models, load_cost_model
from accel_planner.profile.profile import ModelProfile
from accel_state.errors import BackendError


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


def candidates(devices: int, nodes: int = 1, *, blocks: bool = True, kind: str = "cuda") -> list[Candidate]:
    """Returns all strategies for ``devices`` devices on each of ``nodes`` nodes, roughly in order of simplicity.

    ``blocks``: the model has repeated blocks, which activation checkpointing needs. ``kind``: type of the devices.
    """
    return candidates_on(Hardware(devices=devices, nodes=nodes, kind=kind), blocks=blocks)


def candidates_on(hardware: Hardware, *, blocks: bool = True) -> list[Candidate]:
    """Returns all strategies for this hardware, see ``candidates``.

    Raises:
        BackendError: a cost model returns a candidate of another backend.
    """
    found: list[Candidate] = []
    for backend, model in cost_models().items():
        if model.spmd != hardware.spmd:
            continue
        for candidate in model.candidates(hardware):
            if candidate.backend != backend:
                raise BackendError(
                    f"cost model {backend!r} returns candidate {candidate.name!r} of the backend "
                    f"{candidate.backend!r}; expected {backend!r}"
                )
            if blocks or not candidate.checkpointing:
                found.append(candidate)
    return found


def plan_all(
    profile: ModelProfile,
    optimizer: OptimizerFacts,
    hardware: Hardware,
    chosen: Iterable[Candidate] | None = None,
) -> list[MemoryPlan]:
    """Plans all candidates, or those given."""
    if chosen is None:
        chosen = candidates_on(hardware, blocks=bool(profile.blocks))
    return [plan_memory(profile, optimizer, hardware, candidate) for candidate in chosen]


def plan_memory(
    profile: ModelProfile,
    optimizer: OptimizerFacts,
    hardware: Hardware,
    candidate: Candidate,
    model: CostModel | None = None,
) -> MemoryPlan:
    """Plans one candidate by a cost model; None: the installed one of its backend.

    Raises:
        BackendError: no cost model is installed for that backend.
    """
    model = load_cost_model(candidate.backend) if model is None else model
    parts, peak = model.memory(profile, optimizer, hardware, candidate)
    traffic = model.traffic(profile, hardware, candidate)
    flops = model.timeline(profile, candidate).flops
    stepped = parts.optimizer + parts.host if candidate.offload else 0
    return MemoryPlan(candidate, hardware, parts, peak, traffic, estimate_seconds(flops, traffic, hardware, stepped))
