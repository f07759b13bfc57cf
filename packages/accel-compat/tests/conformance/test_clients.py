"""Clients of Accelerate train on accel as they do on Accelerate, and no module of the installed one is loaded."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
PROGRAMS = Path(__file__).parent / "programs"
TRAINERS, TUNERS = str(PROGRAMS / "trainers.py"), str(PROGRAMS / "tuners.py")
TRAINED = ("plain", "accumulation", "bf16", "evaluation", "iterable", "split", "resume")
TUNED = ("sft", "dpo", "lora")
# Evaluation over several processes repeats samples to fill the last batch, with Accelerate as well.
NEAR, NEAR_EVALUATED = 1e-3, 0.02


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name]["losses"] == pytest.approx(one["losses"], rel=NEAR), name
        assert found[name].get("resumed", []) == pytest.approx(one.get("resumed", []), rel=NEAR), name
        evaluated = found[name].get("evaluated", [])
        assert evaluated == pytest.approx(one.get("evaluated", []), rel=NEAR_EVALUATED), name
        assert found[name].get("predicted") == one.get("predicted"), name


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("program", "variants"), [(TRAINERS, TRAINED), (TUNERS, TUNED)], ids=["trainer", "trl-peft"])
def test_losses_are_those_with_accelerate(launched, accelerated, program, variants, processes):
    assert_alike(launched(processes, program, *variants), accelerated(program, *variants))


def test_fsdp2_on_cpus_shards_the_parameters_and_trains_as_one_process(launched, accelerated):
    alone = accelerated(TRAINERS, *TRAINED)["resume"]
    found = launched(2, TRAINERS, "fsdp2")
    assert_alike(found, {"fsdp2": alone})
    assert found["fsdp2"]["wrapped"] == "FSDPLlamaForCausalLM"
    assert found["fsdp2"]["bytes"] == [alone["bytes"][0] // 2] * 2


def test_zero_2_trains_as_one_process(launched, accelerated):
    found = launched(2, TRAINERS, "deepspeed", cpu=False)
    assert_alike(found, {"deepspeed": accelerated(TRAINERS, *TRAINED)["resume"]})
    assert found["deepspeed"]["wrapped"] == "DeepSpeedEngine"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("program", "variants"),
    [(TRAINERS, ("grouped", "compiled")), (TUNERS, ("sft_lora",))],
    ids=["trainer", "trl"],
)
def test_losses_of_further_variants_are_those_with_accelerate(launched, accelerated, program, variants, processes):
    assert_alike(launched(processes, program, *variants), accelerated(program, *variants))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_grpo_takes_its_steps(launched, processes):
    assert launched(processes, TUNERS, "grpo")["grpo"] == {"steps": 3}


@pytest.mark.slow
def test_fsdp2_resumes_from_shards(launched, accelerated):
    found = launched(2, TRAINERS, "fsdp2_sharded")
    assert_alike(found, {"fsdp2_sharded": accelerated(TRAINERS, *TRAINED)["resume"]})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_other_stages_train_as_one_process(launched, accelerated, stage):
    found = launched(2, TRAINERS, f"deepspeed{stage}", cpu=False)
    assert_alike(found, {f"deepspeed{stage}": accelerated(TRAINERS, *TRAINED)["resume"]})
