"""Predicts memory, traffic and order of speed of every way to train a model, and chooses one.

from accel.planner import Hardware, choose, optimizer_facts, plan_all, profile_model
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.planner.auto import AutoStrategy as AutoStrategy
    from accel.planner.candidate import Candidate as Candidate
    from accel.planner.candidate import candidates as candidates
    from accel.planner.choosing import Decision as Decision
    from accel.planner.choosing import choose as choose
    from accel.planner.choosing import ranked as ranked
    from accel.planner.errors import PlanError as PlanError
    from accel.planner.hardware import Hardware as Hardware
    from accel.planner.hardware import parse_size as parse_size
    from accel.planner.measuring import Measured as Measured
    from accel.planner.measuring import Run as Run
    from accel.planner.measuring import measure as measure
    from accel.planner.memory import MemoryPlan as MemoryPlan
    from accel.planner.memory import Parts as Parts
    from accel.planner.memory import plan_all as plan_all
    from accel.planner.memory import plan_memory as plan_memory
    from accel.planner.optimizers import OptimizerFacts as OptimizerFacts
    from accel.planner.optimizers import optimizer_facts as optimizer_facts
    from accel.planner.profile import ModelProfile as ModelProfile
    from accel.planner.profiling import profile_model as profile_model
    from accel.planner.samples import Batch as Batch
    from accel.planner.traffic import Traffic as Traffic

_HOMES = {
    "AutoStrategy": "auto",
    "Batch": "samples",
    "Candidate": "candidate",
    "Decision": "choosing",
    "Hardware": "hardware",
    "Measured": "measuring",
    "MemoryPlan": "memory",
    "ModelProfile": "profile",
    "OptimizerFacts": "optimizers",
    "Parts": "memory",
    "PlanError": "errors",
    "Run": "measuring",
    "Traffic": "traffic",
    "candidates": "candidate",
    "choose": "choosing",
    "measure": "measuring",
    "optimizer_facts": "optimizers",
    "parse_size": "hardware",
    "plan_all": "memory",
    "plan_memory": "memory",
    "profile_model": "profiling",
    "ranked": "choosing",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, {name: f".{module}" for name, module in _HOMES.items()})
