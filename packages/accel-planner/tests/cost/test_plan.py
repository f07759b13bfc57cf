"""Plans: memory and communication of each strategy, by its cost model."""

import pytest
import torch
from torch import nn

from accel_planner import (
    Batch,
    Hardware,
    MemoryPlan,
    ModelProfile,
    candidates,
    optimizer_facts,
    plan_all,
    profile_model,
)
from accel_planner.candidate import named
from accel_testing.equivalence.models import TinyTransformer


def transformer(layers: int = 8, **options: int) -> nn.Module:
    return TinyTransformer(64, 32, layers=layers, **options)


def tokens(batch: int = 4, length: int = 16) -> Batch:
    return Batch(torch.zeros(batch, length, dtype=torch.long))


def test_every_strategy_has_a_plan(plans: dict[str, MemoryPlan]) -> None:
    bases = ["ddp", "fsdp:no_shard", "fsdp:shard_grad_op", "fsdp:hybrid_shard", "fsdp:full_shard"]
    expected = [base + ckpt for base in bases for ckpt in ("", "+ckpt")]
    expected += [base + ckpt + "+offload" for base in bases[2:] for ckpt in ("", "+ckpt")]
    expected += [
        f"zero:{stage}{ckpt}{off}" for stage in (1, 2, 3) for ckpt in ("", "+ckpt") for off in ("", "+offload")
    ]
    assert sorted(plans) == sorted(expected)


def test_more_sharding_takes_less(plans: dict[str, MemoryPlan]) -> None:
    order = ["ddp", "fsdp:hybrid_shard", "fsdp:full_shard"]
    for part in ("parameters", "gradients", "optimizer"):
        sizes = [getattr(plans[name].parts, part) for name in order]
        assert sizes == sorted(sizes, reverse=True)
    assert plans["fsdp:full_shard"].peak < plans["fsdp:shard_grad_op"].peak
    assert plans["fsdp:full_shard+ckpt"].peak < plans["fsdp:full_shard"].peak
    assert plans["fsdp:full_shard+offload"].peak < plans["fsdp:full_shard"].peak
    partitioned = [plans[f"zero:{stage}"].parts for stage in (1, 2, 3)]
    assert partitioned[0].gradients > partitioned[1].gradients == partitioned[2].gradients
    # Parameters as small as these stay whole at stage 3, beside this rank's part of them.
    assert partitioned[2].parameters - partitioned[1].parameters == partitioned[2].gradients // 2


def test_large_parameters_are_partitioned() -> None:
    profile = profile_model(nn.Linear(512, 512), torch.randn(4, 512), loss=lambda model, x: model(x).mean())
    facts = optimizer_facts("adamw", profile.parameters)
    plans = {plan.candidate.name: plan for plan in plan_all(profile, facts, Hardware.parse("8x80GB"))}
    assert plans["zero:3"].parts.parameters < plans["zero:2"].parts.parameters / 7


def test_a_scalar_before_the_other_parameters_changes_no_plan() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    states = []
    for model in (nn.Linear(512, 512), Scaled()):
        profile = profile_model(model, torch.randn(4, 512), loss=lambda model, x: model(x).mean())
        facts = optimizer_facts("adamw", profile.parameters)
        chosen = named(candidates(8), ["ddp", "fsdp:full_shard", "zero:1", "zero:2", "zero:3"])
        plans = plan_all(profile, facts, Hardware.parse("8x80GB"), chosen)
        states.append([plan.parts.optimizer for plan in plans])
    assert states[1] == pytest.approx(states[0], abs=64)


def test_what_is_offloaded_is_on_the_host_to_the_byte(plans: dict[str, MemoryPlan]) -> None:
    here, away = plans["fsdp:full_shard"].parts, plans["fsdp:full_shard+offload"].parts
    assert away.host == here.parameters + here.gradients + here.optimizer
    assert (away.parameters, away.gradients, away.optimizer) == (0, 0, 0)


def test_plans_do_not_depend_on_the_environment(
    profile: ModelProfile, plans: dict[str, MemoryPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "3")
    facts = optimizer_facts("adamw", profile.parameters)
    found = {plan.candidate.name for plan in plan_all(profile, facts, Hardware.parse("8x80GB"))}
    assert found <= set(plans)
    assert found


def test_bytes_sent_are_those_of_rings(profile: ModelProfile) -> None:
    fp32 = profile_model(lambda: transformer(4), tokens())
    facts = optimizer_facts("sgd", fp32.parameters)
    sent = {p.candidate.name: p.traffic for p in plan_all(fp32, facts, Hardware.parse("8x80GB"))}
    size = sum(parameter.nbytes for parameter in fp32.parameters)
    root = sum(parameter.nbytes for parameter in fp32.parameters if parameter.unit == 0)
    assert sent["ddp"].total == 2 * size * 7 // 8
    assert sent["fsdp:shard_grad_op"].total == 2 * (size * 7 // 8)
    assert sent["fsdp:full_shard"].total == 2 * (size * 7 // 8) + (size - root) * 7 // 8
    assert sent["ddp"].remote == 0


def test_a_hybrid_keeps_its_gathering_within_nodes(plans: dict[str, MemoryPlan]) -> None:
    assert plans["fsdp:full_shard"].traffic.local == 0
    assert plans["fsdp:hybrid_shard"].traffic.local > plans["fsdp:hybrid_shard"].traffic.remote > 0


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    model = transformer()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    found = profile_model(model, tokens())
    facts = optimizer_facts("adamw", found.parameters)
    plan = plan_all(found, facts, Hardware.parse("2x80GB"), named(candidates(2), ["ddp"]))[0]
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert plan.parts.gradients == trained
    assert plan.parts.optimizer < 2.1 * trained


@pytest.mark.parametrize(("name", "parts"), [("xla", 1), ("xla:shard", 4)])
def test_a_compiled_step_holds_parts_along_the_longest_dimension(name: str, parts: int) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Linear(40, 3)

    profile = profile_model(build, (torch.zeros(8, 40), torch.zeros(8, dtype=torch.long)))
    facts = optimizer_facts("adamw", profile.parameters)
    hardware = Hardware.parse("4xTPU-v5e")
    assert hardware.kind == "xla"
    (plan,) = plan_all(profile, facts, hardware, named(candidates(4, kind="xla"), [name]))
    matrix, bias = 40 // parts * 3, 3 if parts == 1 else 1
    assert plan.parts.parameters == plan.parts.gradients == 4 * (matrix + bias)
    assert plan.parts.optimizer == 8 * (matrix + bias) + 2 * 4  # and a counter of steps for each parameter
    assert plan.parts.communication == (0 if parts == 1 else 4 * 123)
    assert plan.traffic.total > 0
