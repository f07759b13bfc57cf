"""Predictions against real ranks: parameters, gradients and states within 2 %, the peak within 15 %."""

from importlib.util import find_spec

import pytest
import torch
from covertable import make

from accel_planner import Candidate, Hardware, candidates
from accel_planner.auto import able
from benchmarks.planner import SHAPES, compared, differences

PARTS = ("parameters", "gradients", "optimizer")


def runnable(candidate: Candidate) -> bool:
    """Whether what it would have to compile is here."""
    if candidate.backend != "deepspeed":
        return True
    from accel_deepspeed.library import extensions_folder

    return not candidate.offload or (extensions_folder() / "cpu_adam" / "cpu_adam.so").exists()


def runs(devices: int, nodes: int = 1) -> list[str]:
    """Names of all that run here."""
    every = able(Hardware(devices=devices, nodes=nodes), blocks=True)
    return [candidate.name for candidate in every if runnable(candidate)]


def check(shape: str, strategy: str, ranks: int, **options: str) -> None:
    off = differences(compared(shape, strategy, world=ranks, **options))
    assert all(abs(off[part]) <= 2 for part in PARTS), off
    assert abs(off["peak"]) <= 15, off


@pytest.mark.sampled(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("shape", "strategy", "precision", "optimizer"),
    [
        ("mlp", "ddp", "no", "AdamW"),
        ("gpt", "fsdp:full_shard+ckpt", "no", "SGD"),
        pytest.param("gpt", "fsdp:full_shard", "bf16", "AdamW", marks=pytest.mark.slow),
    ],
)
def test_what_is_predicted_is_what_ranks_take(shape: str, strategy: str, precision: str, optimizer: str) -> None:
    check(shape, strategy, 2, precision=precision, optimizer=optimizer)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        pytest.param("zero:1", "no", marks=pytest.mark.slow),
        pytest.param("zero:2", "bf16", marks=pytest.mark.slow),
        ("zero:3+ckpt", "bf16"),
    ],
)
@pytest.mark.slow
def test_what_is_predicted_is_what_engines_take(strategy: str, precision: str) -> None:
    check("mlp", strategy, 2, precision=precision)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [("mlp", "fsdp:hybrid_shard"), pytest.param("llama", "fsdp:hybrid_shard+ckpt", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_hybrid_takes_what_is_predicted(shape: str, strategy: str) -> None:
    check(shape, strategy, 4)


@pytest.mark.slow
@pytest.mark.ranks(2)
# Each pair of values is together in one of the cases.
@pytest.mark.parametrize(("shape", "strategy", "precision"), make([list(SHAPES), runs(2), ["no", "bf16"]]))
def test_what_is_predicted_is_what_two_ranks_take(shape: str, strategy: str, precision: str) -> None:
    if shape == "conv" and precision == "bf16" and strategy.startswith("zero"):
        pytest.skip("DeepSpeed's bf16 has no batch norm in mixed precision")
    if shape == "conv" and precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("a processor without bf16 unfolds what it convolves into memory that no other device takes")
    check(shape, strategy, 2, precision=precision)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp:full_shard"])
def test_what_other_optimizers_keep_is_predicted(strategy: str, optimizer: str) -> None:
    if optimizer == "Adafactor" and strategy != "ddp":
        pytest.skip("torch's Adafactor does not step on sharded matrices")
    check("mlp", strategy, 2, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [name for name in runs(2, 2) if "+offload" not in name])
# The shapes whose layers differ most: two ranks have all of them under every strategy.
@pytest.mark.parametrize("shape", ["llama", "conv"])
def test_what_is_predicted_is_what_four_ranks_take(shape: str, strategy: str) -> None:
    check(shape, strategy, 4)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_in_a_budget_between_two_measured_peaks_the_choice_fits_and_the_next_faster_does_not() -> None:
    from accel_planner import choose, optimizer_facts, plan_all, profile_model
    from accel_planner.candidate import named
    from benchmarks.planner import loss_of

    names = ["ddp", "fsdp:full_shard+ckpt"]
    rows = {name: compared("llama", name, world=2) for name in names}
    peaks = [rows[name]["measured"]["peak"] for name in names]
    budget = sum(peaks) // 2
    shape = SHAPES["llama"]
    profile = profile_model(shape.build, shape.batch, loss=loss_of)
    facts = optimizer_facts(torch.optim.AdamW(shape.build().parameters()), profile.parameters)
    chosen = [c for name in names for c in named(candidates(2), [name]) if c.name == name]
    decision = choose(plan_all(profile, facts, Hardware.of_cpu(2, 1, 2 * budget), chosen), margin=0.0)
    assert decision.plan.candidate.name == names[1]
    assert [plan.candidate.name for plan in decision.faster] == names[:1]
    assert peaks[1] <= budget < peaks[0]
