"""An optimizer belongs to the models whose parameters it updates, whatever was prepared before it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.prepared import PreparedObjects
from accel_state.errors import ConfigError, PrepareError


def with_a_teacher() -> tuple[Accelerator, nn.Module, nn.Module, torch.optim.Optimizer]:
    """A model in evaluation mode, and after it one that trains."""
    accelerator = Accelerator(cpu=True)
    teacher = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    model = nn.Linear(2, 1)
    return accelerator, teacher, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_a_model_in_evaluation_mode_has_no_optimizer_and_moves_none() -> None:
    accelerator, teacher, model, optimizer = with_a_teacher()
    prepared = accelerator.prepared
    assert prepared.models == [teacher, model]
    assert prepared.optimizers_of(teacher) == []
    assert prepared.optimizers_of(model) == [optimizer.optimizer]


def test_one_optimizer_of_two_models_belongs_to_both_and_added_groups_count() -> None:
    accelerator = Accelerator(cpu=True)
    first, second, third = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    shared = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, third, shared = accelerator.prepare(first, second, third, shared)
    prepared = accelerator.prepared
    assert prepared.optimizers_of(first) == prepared.optimizers_of(second) == [shared.optimizer]
    assert prepared.optimizers_of(third) == []
    shared.add_param_group({"params": list(third.parameters())})
    assert prepared.optimizers_of(third) == [shared.optimizer]


def test_optimizers_that_hold_parameters_are_found_by_them() -> None:
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in reversed(models)]
    first, second, *prepared_optimizers = accelerator.prepare(*models, *optimizers)
    inner = [one.optimizer for one in prepared_optimizers]
    assert accelerator.prepared.holding(first.parameters()) == [inner[1]]
    assert accelerator.prepared.holding([*first.parameters(), *second.parameters()]) == inner


def test_a_gate_reaches_loaders_that_are_added_later() -> None:
    class Loader:
        gate: object = None

    prepared, early, late = PreparedObjects(), Loader(), Loader()
    prepared.add_loader(early)
    prepared.set_gate(lambda loader, batches: batches)
    prepared.add_loader(late)
    prepared.add_loader(late)
    assert prepared.loaders == [early, late]
    assert early.gate is late.gate is not None
    prepared.set_gate(None)
    assert early.gate is late.gate is None


def test_a_model_that_was_not_prepared_has_no_position() -> None:
    accelerator, teacher, model, _ = with_a_teacher()
    assert [accelerator.prepared.position(one) for one in (teacher, model)] == [0, 1]
    with pytest.raises(PrepareError, match="prepare did not return"):
        accelerator.prepared.position(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="2 are prepared"):
        accelerator.prepared.only_model(None)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_folder_of_deepspeed_is_read_into_the_optimizer_of_its_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    writing = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 0})
    model, optimizer = writing.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    writing.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    writing.export_deepspeed(tmp_path)
    writing.end_training()
    accelerator, _, model, optimizer = with_a_teacher()
    accelerator.import_deepspeed(tmp_path, model=model)
    states = optimizer.optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in states.values()} == {1}
    assert len(states) == 2
