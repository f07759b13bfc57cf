"""Cost models of other distributions: one class and one entry point, and every part of the planner considers them."""

import json
import logging
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_launch.cli.app import run
from accel_planner import (
    AutoStrategy,
    CostModel,
    Hardware,
    candidates,
    choose,
    optimizer_facts,
    plan_all,
    profile_model,
)
from accel_planner.auto import able
from accel_planner.candidate import Candidate
from accel_planner.cost.plan import plan_memory
from accel_planner.cost.registry import GROUP, cost_models, load_cost_model
from accel_state import BackendError

MODULE = """
from dataclasses import replace

from accel_planner import Candidate, ReplicatedCost


class SmallStates(ReplicatedCost):
    '''One device whose optimizer keeps its states in eight bits.'''

    def candidates(self, hardware):
        if hardware.ranks == 1:
            unfit = frozenset({"Rprop"})
            base = Candidate("small", "small_states", unfit=unfit)
            yield base
            yield base.checkpointed()

    def memory(self, profile, optimizer, hardware, candidate):
        parts, peak = super().memory(profile, optimizer, hardware, candidate)
        small = parts.optimizer // 4
        return replace(parts, optimizer=small), peak - parts.optimizer + small

    def steps_with(self, optimizer):
        return optimizer.defaults["lr"] < 1


class Lost(ReplicatedCost):
    library = "no_such_library"

    def candidates(self, hardware):
        yield Candidate("lost", "lost")


class Unfinished(ReplicatedCost):
    pass


class Foreign(ReplicatedCost):
    def candidates(self, hardware):
        yield Candidate("foreign", "ddp")


answer = 42
"""
# The backend of both is accel's own under another name: what it does is not the planner's business.
BACKENDS = "[accel.backends]\nsmall_states = accel_backends.single.backend:SingleBackend\nlost = nowhere:Nothing\n"


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    return nn.Sequential(blocks, nn.Linear(64, 10))


SAMPLE = torch.zeros(256, 64), torch.zeros(256, dtype=torch.long)
ONE = Hardware.of_cpu(1, 1, 2**30)


def install(folder: Path, entries: str) -> None:
    info = folder / "somebody-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"{BACKENDS}[{GROUP}]\n{entries}\n")
    (folder / "somebodys_costs.py").write_text(MODULE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("somebodys_costs", None)


@pytest.fixture
def installed(folder: Path) -> None:
    """A distribution with a cost model for its backend, and one for a backend whose library is missing."""
    install(folder, "small_states = somebodys_costs:SmallStates\nlost = somebodys_costs:Lost")


def memory_for_it_alone() -> int:
    """Bytes with which nothing fits but the third party's strategy."""
    profile = profile_model(build, SAMPLE)
    plans = {p.candidate.name: p for p in plan_all(profile, optimizer_facts("adamw", profile.parameters), ONE)}
    small = plans.pop("small+ckpt").peak
    assert small < min(plan.peak for name, plan in plans.items() if not name.startswith("small"))
    return small


def test_entries_of_this_distribution_are_those_that_are_known_without_metadata() -> None:
    from accel_planner.cost.registry import _OWN

    project = Path(__file__).parents[2] / "pyproject.toml"
    entries = tomllib.loads(project.read_text())["project"]["entry-points"][GROUP]
    assert list(entries.items()) == list(_OWN.items())
    for name, value in entries.items():
        kind = EntryPoint(name, value, GROUP).load()
        assert issubclass(kind, CostModel)
        assert type(load_cost_model(name)) is kind


@pytest.mark.usefixtures("installed")
def test_candidates_of_installed_cost_models_follow_those_of_this_package() -> None:
    assert list(cost_models()) == ["single", "ddp", "fsdp", "deepspeed", "xla", "lost", "small_states"]
    names = [candidate.name for candidate in candidates(1)]
    assert names[:2] == ["single", "single+ckpt"]
    assert names[-3:] == ["lost", "small", "small+ckpt"]
    assert "small" not in {candidate.name for candidate in candidates(2)}
    assert "small" not in {candidate.name for candidate in candidates(1, kind="xla")}
    assert not any(c.checkpointing for c in candidates(1, blocks=False))


@pytest.mark.usefixtures("installed")
def test_only_candidates_whose_backend_library_and_optimizer_fit_can_be_chosen() -> None:
    names = {candidate.name for candidate in able(ONE, blocks=True, optimizer="AdamW")}
    assert "small" in names
    assert "lost" not in names
    assert "small" not in {candidate.name for candidate in able(ONE, blocks=True, optimizer="Rprop")}


@pytest.mark.usefixtures("installed")
def test_a_third_partys_strategy_is_planned_and_chosen_if_it_is_all_that_fits() -> None:
    profile = profile_model(build, SAMPLE)
    facts = optimizer_facts("adamw", profile.parameters)
    plans = {plan.candidate.name: plan for plan in plan_all(profile, facts, ONE)}
    saved = plans["single"].parts.optimizer - plans["small"].parts.optimizer
    assert plans["small"].parts.optimizer == plans["single"].parts.optimizer // 4
    assert plans["small"].peak == plans["single"].peak - saved
    assert choose(plans.values()).plan.candidate.name == "single"  # as fast, and first
    assert choose(plans.values(), memory_for_it_alone(), 0.0).plan.candidate.name == "small+ckpt"


@pytest.mark.usefixtures("installed")
def test_auto_takes_a_third_partys_strategy_and_wraps_the_blocks_that_its_backend_does_not() -> None:
    strategy = AutoStrategy(sample=SAMPLE, hardware=Hardware.of_cpu(1, 1, memory_for_it_alone()), margin=0.0)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, _ = accelerator.prepare(model, optimizer)
    assert accelerator.choice.name == "small_states"
    assert "chose small+ckpt" in str(accelerator.choice)
    assert sum(hasattr(type(module), "_accel_recomputed") for module in prepared.modules()) == 4
    accelerator.free_memory()


@pytest.mark.usefixtures("installed")
def test_auto_asks_the_cost_model_about_the_optimizer_itself() -> None:
    accelerator = Accelerator(cpu=True, strategy=AutoStrategy(sample=SAMPLE, candidates=["small", "single"]))
    model = build()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2.0))
    assert accelerator.choice.name == "single"
    with pytest.raises(ValueError, match="no plan to choose from"):
        Accelerator(cpu=True, strategy=AutoStrategy(sample=SAMPLE, candidates=["small"])).prepare(
            other := build(), torch.optim.AdamW(other.parameters(), lr=2.0)
        )
    accelerator.free_memory()


@pytest.mark.usefixtures("installed")
def test_the_command_line_plans_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (folder / "somebodys_model.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(folder)
    assert run(["plan", "somebodys_model:build", "--devices", "1GB", "--json"]) == 0
    found = {plan["strategy"]: plan for plan in json.loads(capsys.readouterr().out)["plans"]}
    assert found["small"]["backend"] == "small_states"
    assert found["small"]["peak"] < found["single"]["peak"]
    sys.modules.pop("somebodys_model", None)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nowhere:Nothing", r"cost model 'odd' \(nowhere:Nothing\) cannot be imported: No module named 'nowhere'"),
        ("somebodys_costs:Absent", "cannot be imported: module 'somebodys_costs' has no attribute 'Absent'"),
        ("somebodys_costs:answer", "is 42; expected a subclass of CostModel"),
        ("somebodys_costs:Unfinished", "cannot be used: .*abstract method.* 'candidates'|abstract method candidates"),
    ],
)
def test_one_that_cannot_be_loaded_says_why_and_leaves_the_others(
    folder: Path, caplog: pytest.LogCaptureFixture, entry: str, words: str
) -> None:
    install(folder, f"odd = {entry}")
    with pytest.raises(BackendError, match=words):
        load_cost_model("odd")
    with caplog.at_level(logging.WARNING):
        assert list(cost_models()) == ["single", "ddp", "fsdp", "deepspeed", "xla"]
    assert "its strategies are not considered" in caplog.text


def test_a_candidate_belongs_to_the_backend_of_its_cost_model(folder: Path) -> None:
    install(folder, "foreign = somebodys_costs:Foreign")
    with pytest.raises(BackendError, match="'foreign' returns candidate 'foreign' of the backend 'ddp'"):
        candidates(2)


@pytest.mark.usefixtures("installed")
def test_a_backend_without_a_cost_model_is_named_with_the_nearest_that_has_one() -> None:
    with pytest.raises(BackendError, match=r"no cost model for the backend 'small_state'.*mean 'small_states'"):
        load_cost_model("small_state")


def test_a_cost_model_plans_without_being_installed() -> None:
    profile = profile_model(build, SAMPLE)
    facts = optimizer_facts("adamw", profile.parameters)
    model = load_cost_model("single")
    plan = plan_memory(profile, facts, ONE, Candidate("mine", "mine"), model)
    assert plan.peak == plan_memory(profile, facts, ONE, Candidate("single", "single")).peak
