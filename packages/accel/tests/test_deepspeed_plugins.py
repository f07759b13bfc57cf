"""DeepSpeed's options as an Accelerator is given them: several plugins, and what contradicts what."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_deepspeed import DeepSpeedPlugin
from accel_state import ConfigError, PrepareError
from accel_state.environment import patch_environment

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.ranks(2)
def test_a_student_and_a_teacher_have_options_of_their_own(rank: int) -> None:
    """The teacher is sharded and only computes; the student learns from it, as it would in one process."""
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": {"zero_stage": 3}}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert list(accelerator.deepspeed_plugins) == ["student", "teacher"]
    student, teacher = make_model(), make_model()
    ours, theirs = make_model(), make_model()
    with torch.no_grad():
        for model in (teacher, theirs):
            for parameter in model.parameters():
                parameter.requires_grad_(False).mul_(2)
    student, optimizer = accelerator.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
    accelerator.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin.zero_stage == 3
    teacher = accelerator.prepare(teacher)
    assert teacher.zero_optimization_stage() == 3
    assert student.zero_optimization_stage() == 2
    plain = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(3):
        both = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        mine = both.chunk(2)[rank]
        with torch.no_grad():
            wanted, expected = teacher(mine), theirs(both)
        accelerator.backward((student(mine) - wanted).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        (ours(both) - expected).pow(2).mean().backward()
        plain.step()
        plain.zero_grad()
    state = accelerator.get_state_dict(student)
    if rank == 0:
        assert max((state[name] - value).abs().max() for name, value in ours.state_dict().items()) < 1e-6
    accelerator.free_memory()


def test_a_plugin_that_is_not_there_is_refused_with_the_nearest() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugins={"student": {"zero_stage": 2}, "teacher": {}})
    with pytest.raises(ConfigError, match="did you mean 'teacher'"):
        accelerator.select_deepspeed_plugin("techer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"deepspeed_plugins": {}}, "deepspeed_plugins is empty"),
        ({"deepspeed_plugins": {"a": {}}, "deepspeed_plugin": {}}, "were both given"),
        (
            {"deepspeed_plugins": {"a": {"bf16": {"enabled": True}}, "b": {"fp16": {"enabled": True}}}},
            r"plugin 'a': .*bf16.enabled says .* plugin 'b': .*fp16.enabled",
        ),
        (
            {"deepspeed_plugin": {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps": 2},
            r"gradient_accumulation_steps is 2 \(.*\), and deepspeed_plugin gradient_accumulation_steps says 4",
        ),
        (
            {"deepspeed_plugin": {"bf16": {"enabled": True}}, "mixed_precision": "fp16"},
            r"mixed_precision is 'fp16' \(.*\), and .*bf16.enabled says 'bf16'",
        ),
        ({"deepspeed_plugin": {"zero_stge": 2}}, "did you mean 'zero_stage'"),
        ({"deepspeed_plugin": {}, "fsdp_plugin": {}}, "were both given"),
        ({"deepspeed_plugin": {}, "strategy": "ddp"}, "were both given"),
    ],
)
def test_what_contradicts_is_refused_with_both_origins(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, **arguments)


def test_a_variable_that_contradicts_the_configuration_is_named() -> None:
    with (
        patch_environment(ACCELERATE_DEEPSPEED_ZERO_STAGE="1"),
        pytest.raises(ConfigError, match=r"ACCELERATE_DEEPSPEED_ZERO_STAGE says 1, and .*zero_optimization.stage = 3"),
    ):
        Accelerator(cpu=True, deepspeed_plugin={"zero_optimization": {"stage": 3}})


@pytest.mark.ranks(1)
def test_two_models_of_one_call_are_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 2})
    with pytest.raises(PrepareError, match="one model in a call, and got 2"):
        accelerator.prepare(make_model(), make_model())


@pytest.mark.ranks(1)
def test_an_optimizer_that_offloading_cannot_take_is_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 2, "offload_optimizer": True})
    model = make_model()
    with pytest.raises(PrepareError, match=r"SGD cannot update optimizer states that are offloaded; Adam, AdamW"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
