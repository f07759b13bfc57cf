"""The Accelerator with Accelerate's semantics."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.data import DataLoader

from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.options.fsdp import CompatFSDPPlugin
from accel_compat.state.accelerator_state import SharedAcceleratorState


def _run(steps, batches=5):
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(batches, 2), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def test_windows_end_with_their_loader():
    accelerator, model, _, loader = _run(2)
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            seen.append((accelerator.sync_gradients, accelerator.step))
    assert seen == [(False, 1), (True, 2), (False, 3), (True, 4), (True, 0)]


def test_a_short_window_is_divided_by_the_full_number():
    accelerator, model, _, loader = _run(4, batches=1)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
    assert torch.equal(model.weight.grad, torch.full((1, 2), 0.25))


def test_optimizers_step_only_when_gradients_are_synchronised():
    accelerator, model, optimizer, loader = _run(2, batches=2)
    weights = [model.weight.detach().clone()]
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            weights.append(model.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_two_accelerators_share_their_state():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    first = Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == first.mixed_precision == AcceleratorState().mixed_precision == "bf16"


def test_another_precision_of_a_second_accelerator_is_refused():
    from accelerate import Accelerator

    Accelerator(mixed_precision="bf16")
    with pytest.raises(ValueError, match="already been initialized and cannot be changed"):
        Accelerator(mixed_precision="no")


def test_a_model_that_is_prepared_again_computes_in_the_precision():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(2, 2))
    dtypes = []
    model[0].register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
    for _ in range(2):
        accelerator.free_memory()
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(prepared(torch.ones(1, 2)).sum())
        optimizer.step()
        assert accelerator.prepare(prepared) is prepared
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_a_saved_state_is_restored(tmp_path):
    accelerator, model, optimizer, loader = _run(1)
    accelerator.save_state(str(tmp_path / "state"))
    saved = model.weight.detach().clone()
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert not torch.equal(model.weight, saved)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, saved)
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}


def test_folders_without_automatic_names_are_not_among_the_checkpoints(tmp_path):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    base = tmp_path / "checkpoints"
    (base / "best").mkdir(parents=True)
    (base / "run_2024").mkdir()
    with pytest.raises(ValueError, match="no folder checkpoint_0"):
        accelerator.load_state()
    for step in range(12):
        accelerator.step = step
        accelerator.save_state()
    assert {path.name for path in base.iterdir()} == {"best", "run_2024", "checkpoint_10", "checkpoint_11"}
    accelerator.step = 0
    accelerator.load_state()
    assert accelerator.step == 11


def test_a_subclass_has_the_decorators_without_a_function():
    from accelerate import Accelerator

    class Run(Accelerator):
        pass

    calls = []
    Run().on_process(process_index=0)(calls.append)("here")
    Run().on_local_process(local_process_index=0)(calls.append)("there")
    assert calls == ["here", "there"]


def test_buffers_stay_full_without_context_parallelism():
    from accelerate import Accelerator

    tokens = torch.arange(6).reshape(1, 6)
    with Accelerator().maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.ranks(2)
def test_units_are_chosen_by_a_function_that_a_script_sets_after_the_construction(rank):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ACCELERATE_USE_FSDP", "true")  # as the plugin does
        plugin = CompatFSDPPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
        accelerator = CompatAccelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Sequential))
    accelerator.state.fsdp_plugin.auto_wrap_policy = policy
    model = accelerator.prepare(model)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", "1"]
    SharedAcceleratorState._reset_state(reset_partial_state=True)
