"""The planner: what it reads, what it knows of a model, how it chooses. All of it without memory for the model."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_planner import (
    Batch,
    Candidate,
    Hardware,
    MemoryPlan,
    ModelProfile,
    PlanError,
    candidates,
    choose,
    optimizer_facts,
    parse_size,
    plan_all,
    profile_model,
    ranked,
)
from accel_planner.candidate import named
from accel_planner.cost.communication import Traffic
from accel_planner.cost.model import Parts
from accel_planner.profile import layer_compression as folding
from accel_planner.profile.memory_tracker import StorageWatch
from accel_planner.profile.profile import Mark, ParameterFact, Variant
from accel_planner.select import fits, usable
from accel_state import ConfigError
from accel_testing.equivalence.models import TinyMLP, TinyTransformer

GB = 10**9


def transformer(layers: int = 8, **options: int) -> nn.Module:
    return TinyTransformer(64, 32, layers=layers, **options)


def tokens(batch: int = 4, length: int = 16) -> Batch:
    return Batch(torch.zeros(batch, length, dtype=torch.long))


# ----------------------------------------------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "memory"),
    [
        ("8x80GB", 1, 8, 80 * GB),
        ("80GiB", 1, 1, 80 * 2**30),
        ("2x8x80GB", 2, 8, 80 * GB),
        (" 4 x 24 gb ", 1, 4, 24 * GB),
        ("8*1.5TB", 1, 8, 1500 * GB),
        ("8xH100", 1, 8, 79 * 2**30),
    ],
)
def test_hardware_is_read_as_people_write_it(text: str, nodes: int, devices: int, memory: int) -> None:
    hardware = Hardware.parse(text)
    assert (hardware.nodes, hardware.devices, hardware.memory) == (nodes, devices, memory)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not understood"),
        ("8x", "not understood"),
        ("8x80GX", "did you mean G"),
        ("0x80GB", "no number of devices"),
        ("ax80GB", "neither a size nor one of"),
        ("8x80Gb/x", "is no size"),
        ("8x80qb", "did you mean"),
        ("8x0GB", "is nothing"),
        ("8xH10", "did you mean H100"),
        ("1x2x3x80GB", "not understood"),
        ("eight", "neither a size nor one of"),
        ("8xRTX4090", "'RTX4090' in devices '8xRTX4090' is neither a size nor one of V100, .*H100"),
        ("2x8xMI300X", "'MI300X' in devices '2x8xMI300X' is neither a size nor one of"),
        ("8", "as in 8x80GB or 8xH100"),
        ("2x8", "say nothing of a device's memory"),
    ],
)
def test_nonsense_hardware_is_refused_with_what_would_work(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Hardware.parse(text)


def test_nodes_are_said_once() -> None:
    assert Hardware.parse("8x80GB", nodes=2).ranks == 16
    with pytest.raises(ConfigError, match="say 2 nodes, and nodes=3"):
        Hardware.parse("2x8x80GB", nodes=3)


@given(st.integers(1, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_come_back_as_bytes(number: int, unit: str) -> None:
    base, power = (1024, "KMGT".index(unit[0]) + 1) if "i" in unit else (1000, "BkMGT".index(unit[0]))
    assert parse_size(f"{number}{unit}") == number * base**power


# -------------------------------------------------------------------------------------------------- optimizers


def facts_of(*parameters: nn.Parameter) -> list[ParameterFact]:
    return [ParameterFact(str(at), tuple(p.shape), p.dtype, True, 0) for at, p in enumerate(parameters)]


@pytest.mark.parametrize(
    "kind", ["sgd", "momentum", "adam", "adamw", "adafactor", "rmsprop", "adagrad", "radam", "nadam", "adamax", "asgd"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predicted_states_are_those_that_a_step_makes(kind: str, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in [(), (5,), (6, 40), (3, 4, 5), (2, 7, 3, 3)]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    facts = optimizer_facts(kind, facts_of(*parameters))
    options: dict[str, Any] = {"momentum": 0.9} if kind == "momentum" else {}
    name = {"momentum": "SGD", "sgd": "SGD"}.get(kind)
    classes = {key.lower(): value for key, value in vars(torch.optim).items()}
    optimizer = (getattr(torch.optim, name) if name else classes[kind])(parameters, lr=0.1, **options)
    optimizer.step()
    for fact, parameter in zip(facts_of(*parameters), parameters, strict=True):
        made = optimizer.state.get(parameter, {}).values()
        held = sum(v.untyped_storage().nbytes() for v in made if isinstance(v, torch.Tensor))
        assert facts.state_bytes(fact, 1) == held


def test_states_of_the_parameters_shape_are_sharded_and_others_are_not() -> None:
    (fact,) = facts_of(nn.Parameter(torch.zeros(100, 40)))
    assert optimizer_facts("adam", [fact]).state_bytes(fact, 8) == 2 * 13 * 40 * 4 + 4
    assert optimizer_facts("adafactor", [fact]).state_bytes(fact, 8) == (100 + 40 + 1) * 4


def test_a_step_over_lists_takes_memory_for_all_parameters_at_once() -> None:
    parameters = facts_of(*(nn.Parameter(torch.zeros(100, 40)) for _ in range(5)))
    single, multi = (optimizer_facts("adamw", parameters, foreach=lists) for lists in (False, True))
    sizes = [(fact, fact.numel) for fact in parameters]
    assert multi.together
    assert not single.together
    assert single.scratch_bytes(sizes) <= 3 * 16000 < 5 * 16000 == multi.scratch_bytes(sizes)


def test_an_optimizer_stands_for_others_with_its_options() -> None:
    model = TinyMLP()
    facts = [
        optimizer_facts(torch.optim.SGD(model.parameters(), lr=0.1, momentum=m), facts_of(*model.parameters()))
        for m in (0, 0.9)
    ]
    first = facts_of(*model.parameters())[0]
    assert [one.state_bytes(first, 1) for one in facts] == [0, first.nbytes]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adamv", "no optimizer 'adamv'; known: adadelta, .*; did you mean 'adam'"),
        ("nowhere:Thing", "cannot be imported"),
        ("lbfgs", "cannot step on a small"),
        ("torch.optim:Nothing", "cannot be imported"),
    ],
)
def test_an_unknown_optimizer_is_refused_with_what_there_is(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer_facts(kind, facts_of(nn.Parameter(torch.zeros(3))))


# ----------------------------------------------------------------------------------------------------- profiles


def test_looking_at_a_model_changes_nothing_of_it() -> None:
    model = transformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_model(model, tokens(), policy="bf16")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bytes_of_parameters_are_exact_and_tied_ones_count_once() -> None:
    model = transformer()
    profile = profile_model(model)
    assert sum(parameter.nbytes for parameter in profile.parameters) == sum(p.nbytes for p in model.parameters())
    assert "head.weight" not in {parameter.name for parameter in profile.parameters}


@pytest.mark.parametrize("policy", ["no", "bf16", "bf16-true"])
def test_repeated_blocks_are_looked_at_once_and_counted_as_often_as_they_come(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = profile_model(transformer, tokens(), policy=policy).timelines
    monkeypatch.setattr(folding, "foldable", lambda *_: [])
    whole = profile_model(transformer, tokens(), policy=policy).timelines

    def plain(marks: tuple[Mark, ...]) -> list[Mark]:  # operations are copied as a sum, not mark by mark
        return [dataclasses.replace(mark, flops=0) for mark in marks]

    assert {v: plain(t.marks) for v, t in quick.items()} == {v: plain(t.marks) for v, t in whole.items()}
    assert {v: t.flops for v, t in quick.items()} == {v: t.flops for v, t in whole.items()}


class Picky(nn.Module):
    """Looks into its blocks, so that none can be left out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block[1](block[0](x))
        return x


def test_a_model_that_looks_into_its_blocks_is_traced_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="accel_planner.profile.profiler")
    few, many = (profile_model(Picky(layers), Batch(torch.zeros(4, 8))).timelines[Variant()] for layers in (4, 8))
    assert 1.9 < many.flops / few.flops < 2.2
    assert "repeated blocks are looked at one by one: PlanError" in caplog.text
    assert "'PassedOver' object is not subscriptable" in caplog.text


class Residual(nn.Module):
    """Adds each block's input to its output, between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


def test_what_a_model_computes_between_its_blocks_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = profile_model(Residual(), Batch(torch.zeros(4, 8))).timelines
    monkeypatch.setattr(folding, "foldable", lambda *_: [])
    assert quick == profile_model(Residual(), Batch(torch.zeros(4, 8))).timelines


def test_checkpointing_trades_activations_for_operations() -> None:
    plain, again = (
        profile_model(transformer, tokens()).timeline(native=False, checkpointed=ckpt) for ckpt in (False, True)
    )
    assert again.activations < 0.5 * plain.activations
    assert 1.2 < again.flops / plain.flops < 1.4


def test_operations_are_those_of_the_usual_count() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    flops = profile_model(model, Batch(torch.zeros(32, 64, requires_grad=False))).timelines[Variant()].flops
    assert flops == (3 + 2) * 2 * 32 * 64 * 64  # nobody asks for the first layer's gradient of its input


def test_without_a_batch_activations_are_left_out_and_it_says_so() -> None:
    profile = profile_model(TinyMLP)
    assert profile.timelines[Variant()].activations == 0
    assert "activations are not counted" in profile.notes[0]


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, int(torch.ones(1).item()) + 1)


def test_a_constructor_that_fails_on_the_meta_device_is_run_for_real_and_it_says_so() -> None:
    profile = profile_model(NeedsValues)
    assert profile.numel == 10
    assert "fails on the meta device" in profile.notes[0]


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (broken, {}, r"broken\(\) cannot build its model: on the meta device, RuntimeError: no weights here"),
        (lambda: 3, {}, "gives a int; expected an nn.Module"),
        (3, {}, "a int is no model"),
        (TinyMLP, {"sample": torch.zeros(2, 3)}, r"cannot be run with a batch of \(2, 3\) float32 .*give a sample"),
        (TinyMLP, {"batch_size": 2}, "does not say what TinyMLP is called with"),
        (TinyMLP, {"sample": torch.zeros(2, 8), "loss": lambda m, b: m(b)}, r"the loss of TinyMLP is \(2, 4\)"),
        (TinyMLP, {"sample": torch.zeros(2, 8), "loss": lambda m, b: 1.0}, "the loss of TinyMLP is float"),
        (nn.Bilinear(2, 2, 2), {"seq_length": 3}, "needs input1, input2, and token ids are but one"),
    ],
)
def test_what_cannot_be_looked_at_is_explained(source: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        profile_model(source, options.pop("sample", None), **options)


def test_storages_are_counted_once_and_until_they_go() -> None:
    with StorageWatch() as watch:
        a = torch.zeros(100)
        b = a.view(10, 10).t()
        c = a + 1
        held = watch.live
        del a, b
    assert (held, watch.live, watch.peak) == (800, 400, 800)
    del c


@pytest.mark.parametrize(("layout", "copied"), [(torch.contiguous_format, 1), (torch.channels_last, 0)])
def test_a_convolution_copies_what_it_reads_into_its_own_layout(layout: torch.memory_format, copied: int) -> None:
    image, weight = torch.zeros(2, 4, 8, 8).to(memory_format=layout), torch.zeros(4, 4, 3, 3)
    with StorageWatch() as watch:
        result = torch.conv2d(image, weight, padding=1)
    assert (watch.live, watch.peak) == (result.nbytes, result.nbytes + copied * image.nbytes)


# ------------------------------------------------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(lambda: transformer(heads=4), tokens(8), policy="bf16")


@pytest.fixture(scope="module")
def plans(profile: ModelProfile) -> dict[str, MemoryPlan]:
    facts = optimizer_facts("adamw", profile.parameters)
    return {plan.candidate.name: plan for plan in plan_all(profile, facts, Hardware.parse("2x4x80GB"))}


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


def test_what_is_offloaded_is_on_the_host_to_the_byte(plans: dict[str, MemoryPlan]) -> None:
    here, away = plans["fsdp:full_shard"].parts, plans["fsdp:full_shard+offload"].parts
    assert away.host == here.parameters + here.gradients + here.optimizer
    assert (away.parameters, away.gradients, away.optimizer) == (0, 0, 0)


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


# ---------------------------------------------------------------------------------------------------- choosing


def made(name: str, peak: int, seconds: float, memory: int = 100, host: int = 0) -> MemoryPlan:
    parts = Parts(peak, 0, 0, 0, 0, 0, 0, host)
    hardware = Hardware(memory=memory, host_memory=50)
    return MemoryPlan(Candidate(name, "ddp"), hardware, parts, peak, Traffic(0, 0, 0, 0), seconds)


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=12)


@given(sizes, st.integers(1, 400), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_choice_fits_and_nothing_faster_does(found: list[tuple[int, int]], budget: int, margin: float) -> None:
    every = [made(str(at), peak, seconds) for at, (peak, seconds) in enumerate(found)]
    fitting = [plan for plan in every if plan.peak <= usable(budget, margin)]
    if not fitting:
        with pytest.raises(PlanError, match="Nearest is"):
            choose(every, budget, margin)
        return
    decision = choose(every, budget, margin)
    assert decision.plan in fitting
    assert decision.plan.seconds == min(plan.seconds for plan in fitting)
    assert all(plan.peak > usable(budget, margin) for plan in decision.faster)


def test_a_choice_says_what_would_change_it() -> None:
    decision = choose([made("ddp", 150 * GB, 1), made("fsdp", 60 * GB, 2), made("slow", 10 * GB, 3)], 80 * GB, 0.0)
    assert decision.plan.candidate.name == "fsdp"
    assert decision.changes == ("with 65.2 GiB more per device: ddp",)
    assert "1 faster one does not fit" in str(decision)


def test_more_memory_of_the_size_that_was_said_does_change_it() -> None:
    every = [made("ddp", 150 * GB, 1), made("fsdp", 60 * GB, 2)]
    assert choose(every, 80 * GB).changes == ("with 80.72 GiB more per device: ddp",)
    assert choose(every, 80 * GB + int(80.72 * 2**30)).plan.candidate.name == "ddp"


def test_nothing_that_fits_names_the_nearest_and_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"Nearest is small, which needs 88.48 GiB per device, 4.657 GiB too much"):
        choose([made("big", 200 * GB, 1, 100 * GB), made("small", 95 * GB, 2, 100 * GB)])


def test_offloading_needs_room_on_the_host() -> None:
    with pytest.raises(PlanError, match="nothing fits the host memory"):
        choose([made("offload", 10, 1, host=60)])


@pytest.mark.parametrize("budget", range(1, 12))
def test_in_simulated_budgets_the_choice_fits_and_the_next_faster_does_not(
    plans: dict[str, MemoryPlan], budget: int
) -> None:
    order = ranked(plans.values())
    smallest, largest = min(plan.peak for plan in order), max(plan.peak for plan in order)
    memory = int(smallest + (largest - smallest) * budget / 11) + 1
    decision = choose(order, memory, 0.0)
    assert fits(decision.plan, memory, 0.0)
    place = order.index(decision.plan)
    assert place == len(decision.faster)
    assert not any(fits(plan, memory, 0.0) for plan in order[:place])


def test_candidates_are_found_by_name_or_family() -> None:
    every = candidates(8)
    assert [c.name for c in named(every, ["DDP"])] == ["ddp", "ddp+ckpt"]
    assert [c.name for c in named(every, ["ddp+ckpt"])] == ["ddp+ckpt"]
    with pytest.raises(ConfigError, match="did you mean 'fsdp:full_shard'"):
        named(every, ["fsdp:fullshard"])


@pytest.mark.parametrize(
    ("optimizer", "families"),
    [("adamw", {"ddp", "fsdp", "zero"}), ("Adafactor", {"ddp"}), ("rprop", {"ddp", "zero"}), ("Muon", {"ddp", "fsdp"})],
)
def test_a_candidate_says_which_optimizers_it_takes(optimizer: str, families: set[str]) -> None:
    taken = {re.split("[:+]", candidate.name)[0] for candidate in candidates(8, 2) if candidate.takes(optimizer)}
    assert taken == families


def test_names_of_the_planner_are_all_there() -> None:
    import accel_planner as planner

    assert sorted(planner.__all__) == list(planner.__all__)
    assert all(getattr(planner, name) is not None for name in planner.__all__)


# ------------------------------------------------------------------------------------------------- XLA's devices


def test_devices_of_xla_have_strategies_of_their_own() -> None:
    assert [c.name for c in candidates(4, kind="xla")] == ["xla", "xla:shard"]
    assert not any(c.backend == "xla" for c in candidates(4))


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
