"""Checkpoints of a run are loaded as those of a model are."""

import pytest
import torch

from accel_ckpt import save
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.weights.loading import load_checkpoint_in_model
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


@pytest.fixture
def run(three_layers, tmp_path):
    """A trained model, and the checkpoint of its run."""
    model = three_layers()
    model(torch.randn(8, 3))
    save(tmp_path / "run", {"model": model.state_dict(), "custom_0": {"step": 3}})
    return model, tmp_path / "run"


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_model_is_loaded_from_the_checkpoint_of_its_run(run, three_layers, dtype):
    trained, folder = run
    with init_empty_weights(include_buffers=True):
        model = three_layers()
    load_checkpoint_in_model(model, folder, strict=True, dtype=dtype)
    expected = trained.to(dtype or torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_weights_on_disk_are_written_to_the_offload_folder(run, three_layers, tmp_path):
    trained, folder = run
    with init_empty_weights():
        model = three_layers()
    places = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    load_checkpoint_and_dispatch(model, folder, places, offload_folder=tmp_path / "offload")
    trained.eval(), model.eval()
    x = torch.randn(2, 3)
    assert (tmp_path / "offload" / "linear1.weight.dat").is_file()
    assert torch.equal(model(x), trained(x))


def test_a_model_of_another_shape_is_refused(run, three_layers):
    _, folder = run
    model = three_layers()
    model.linear2 = torch.nn.Linear(4, 7)
    before = model.linear1.weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"linear2\.weight is \[5, 4\] in the checkpoint and \[7, 4\]"):
        load_checkpoint_in_model(model, folder)
    assert torch.equal(model.linear1.weight, before)


def test_a_damaged_weight_is_refused_by_its_digest(run, three_layers):
    _, folder = run
    data = next(path for path in folder.rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-4] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=data.name):
        load_checkpoint_in_model(three_layers(), folder)


def test_a_run_without_a_model_names_what_it_has(three_layers, tmp_path):
    save(tmp_path / "run", {"other": {"weight": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"holds no 'model'; it holds 'other'"):
        load_checkpoint_in_model(three_layers(), tmp_path / "run")
