"""A model's profile, and the plans of all strategies for it on eight devices."""

import pytest
import torch

from accel_planner import Batch, Hardware, MemoryPlan, ModelProfile, optimizer_facts, plan_all, profile_model
from accel_testing.equivalence.models import TinyTransformer


@pytest.fixture(scope="session")
def profile() -> ModelProfile:
    return profile_model(
        lambda: TinyTransformer(64, 32, layers=8, heads=4), Batch(torch.zeros(8, 16, dtype=torch.long)), policy="bf16"
    )


@pytest.fixture(scope="session")
def plans(profile: ModelProfile) -> dict[str, MemoryPlan]:
    facts = optimizer_facts("adamw", profile.parameters)
    return {plan.candidate.name: plan for plan in plan_all(profile, facts, Hardware.parse("2x4x80GB"))}
